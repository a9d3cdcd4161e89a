# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Time whole training steps of our models and of others' models of the same shape.

A step is forward, backward and fused AdamW on random tokens. The models take turns in one process,
eager and compiled block by block:

    full          our llama_full
    titan         torchtitan's llama3
    transformers  transformers' LlamaForCausalLM
    cola          our llama_cola
    published     transformers' model with CoLA's published formula in its linears
    svd, lax      our llama_svd and llama_lax

    python -m scripts.bench.peers --flavor 60M --batch 8 --seq_len 256 --out peers.png

Ratios are medians over the turns, with their quartiles. CPU time depends less on other load than
time by the clock. "saved" is what the model's forward pass keeps for backward, weights and the loss
aside. The script needs no network; the peers need transformers.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from scripts.bench.harness import machine
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.compat.dispatch import remake_inputs_of_products
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import cross_entropy_sum, summed_loss
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel, loss_arguments
from torchtitan_lr.titan.base import LossFunction
from torchtitan_lr.titan.device import keep_freed_memory
from torchtitan_lr.titan.specs import RoPEScalingArgs
from torchtitan_lr.training.figures import TEXT, finish, new_figure

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of a block by transformers' names."""


@dataclass(frozen=True)
class Workload:
    """What every model computes in one step.

    Args:
        flavor: Shape of the models, one of ``models.flavors``.
        batch: Sequences of a step.
        seq_len: Tokens of a sequence.
        layers: Blocks; 0 for the flavor's.
        vocab_size: Vocabulary; 0 for the flavor's. A small one shows the blocks.
        dtype: Of weights and activations.
        device: Where to run.
        ffn_dim: Width of the feed-forward; 0 for the flavor's.
    """

    flavor: str
    batch: int
    seq_len: int
    layers: int = 0
    vocab_size: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    ffn_dim: int = 0

    def args(self, family: str) -> LlamaArgs:
        """Return the model's arguments in one family."""
        args = replace(FLAVORS[family][self.flavor], max_seq_len=self.seq_len)
        layers, vocab_size = self.layers or args.n_layers, self.vocab_size or args.vocab_size
        ffn_dim = self.ffn_dim or args.ffn_dim
        return replace(args, n_layers=layers, vocab_size=vocab_size, ffn_dim=ffn_dim)


class PublishedCoLA(nn.Module):
    """One linear by CoLA's published formula, y = B σ(A x) with σ = SiLU (Eq. 3).

    The factors are stored as the input meets them: A (d_in, r), B (r, d_out).
    """

    def __init__(self, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(d_in, rank) * d_in**-0.5)
        self.B = nn.Parameter(torch.randn(rank, d_out) * rank**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, d_in) to (b, s, d_out)."""
        return torch.matmul(F.silu(torch.matmul(x, self.A)), self.B)


def build_ours(workload: Workload, family: str) -> nn.Module:
    """Build one of our models."""
    model = LlamaModel(workload.args(family))
    model.init_weights()
    return model


def build_titan(workload: Workload) -> nn.Module:
    """Build torchtitan's llama3 of the full-rank shape, rotary frequencies unscaled as ours."""
    ours = workload.args("full")
    hidden = int(2 * 4 * ours.dim / 3)
    scaling = ours.rope_scaling or RoPEScalingArgs(scaling_factor=1.0)
    args = TransformerModelArgs(
        dim=ours.dim,
        n_layers=ours.n_layers,
        n_heads=ours.n_heads,
        n_kv_heads=ours.n_kv_heads,
        vocab_size=ours.vocab_size,
        multiple_of=1,
        ffn_dim_multiplier=(ours.ffn_dim + 0.5) / hidden,
        norm_eps=ours.norm_eps,
        rope_theta=ours.rope_theta,
        rope_scaling_args=scaling,
        max_seq_len=ours.max_seq_len,
    )
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    return model


def build_transformers(workload: Workload, factorised: bool = False) -> nn.Module:
    """Build transformers' LLaMA.

    ``factorised`` linears of its blocks follow CoLA's formula, with ``llama_cola``'s ranks.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ConfigError("--peers", "transformers", "pip install transformers") from None
    ours = workload.args("cola" if factorised else "full")
    config = LlamaConfig(
        hidden_size=ours.dim,
        intermediate_size=ours.ffn_dim,
        num_hidden_layers=ours.n_layers,
        num_attention_heads=ours.n_heads,
        num_key_value_heads=ours.kv_heads,
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.norm_eps,
        rope_theta=ours.rope_theta,
        max_position_embeddings=ours.max_seq_len,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    if factorised:
        for layer in model.model.layers:
            _factorise(layer.self_attn, ours.rank_attention)
            _factorise(layer.mlp, ours.rank_ffn)
    return _Logits(model)


def _factorise(module: nn.Module, rank: int) -> None:
    for name, linear in list(module.named_children()):
        if name in LINEARS:
            linear = cast(nn.Linear, linear)
            setattr(module, name, PublishedCoLA(linear.in_features, linear.out_features, rank))


class _Logits(nn.Module):
    """transformers' model, called as the others are: tokens (b, s) to logits (b, s, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder blocks."""
        return cast(nn.ModuleList, self.model.get_submodule("model.layers"))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


PEERS: dict[str, Callable[[Workload], nn.Module]] = {
    "full": lambda workload: build_ours(workload, "full"),
    "titan": build_titan,
    "transformers": build_transformers,
    "cola": lambda workload: build_ours(workload, "cola"),
    "published": lambda workload: build_transformers(workload, factorised=True),
    "svd": lambda workload: build_ours(workload, "svd"),
    "lax": lambda workload: build_ours(workload, "lax"),
}
"""Builders by name: ``titan`` and ``transformers`` are peers of ``full``, ``published`` of
``cola``."""

RATIOS = (
    ("full", "titan"),
    ("full", "transformers"),
    ("cola", "published"),
    ("cola", "full"),
    ("svd", "full"),
    ("lax", "full"),
)
"""Pairs that are compared: the first over the second."""

MODES = ("eager", "compiled")
"""How the models run."""

CLOCKS = ("wall", "cpu")
"""Time by the clock, and CPU time of this process, which a busy machine changes less."""


class Runner:
    """One model of `PEERS` with its optimizer and batch."""

    def __init__(self, name: str, workload: Workload) -> None:
        torch.manual_seed(0)
        with torch.device(workload.device):  # a host would draw a billion weights in 15 seconds
            self.model = PEERS[name](workload)
        for parameter in self.model.parameters():
            # Only these: a cast of the module would spoil the others' rotary tables.
            parameter.data = parameter.data.to(workload.dtype)
        ours = isinstance(self.model, LlamaModel)
        self.loss: LossFunction = summed_loss
        self.low_rank = ours and cast(LlamaArgs, self.model.model_args).low_rank
        self.cuda = workload.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        vocabulary = workload.args("full").vocab_size
        shape = (workload.batch, workload.seq_len + 1)
        tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(workload.device)
        self.tokens, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def compile(self, mode: str | None = None) -> None:
        """Compile each block, and the loss of logits, as a training run does."""
        layers = cast(Any, self.model).layers
        for block in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
            block.compile(mode=mode)
        if not isinstance(self.model, LlamaModel):  # else the head computes it
            self.loss = torch.compile(cross_entropy_sum)

    def forward(self) -> Tensor:
        """Return the loss (nats per token) with its graph."""
        # For what is compiled in this step, as a training run does; others have torch's default.
        remake_inputs_of_products(self.low_rank)
        torch.compiler.cudagraph_mark_step_begin()  # graphs, if blocks have them, may be used again
        prediction = self.model(self.tokens, **loss_arguments(self.model, self.labels))
        return self.loss(prediction, self.labels) / self.labels.numel()

    def step(self) -> Tensor:
        """Train for one step; return the loss, which the host does not read."""
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed_step(self) -> tuple[float, float]:
        """Train for one step; return its seconds by the clock and of this process's CPU time."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - cpu

    def saved_bytes(self) -> int:
        """Return the bytes that the model's forward pass saves for backward, weights aside.

        Without what the loss saves, which is the same for all. A GPU's allocator counts them; on a
        CPU a hook sees each, which compiles the blocks once more.
        """
        if self.cuda:
            before = torch.cuda.memory_allocated()
            logits = self.model(self.tokens)
            return torch.cuda.memory_allocated() - before - logits.untyped_storage().nbytes()
        outside = {
            t.untyped_storage().data_ptr()
            for t in (*self.model.parameters(), *self.model.buffers(), self.tokens)
        }
        saved: dict[int, Tensor] = {}

        def pack(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logits = self.model(self.tokens)
        del logits
        gc.collect()
        kept = {address: x for address, x in saved.items() if address not in outside}
        return sum(x.untyped_storage().nbytes() for x in kept.values())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the quartiles of some values: ``low``, ``median`` and ``high``."""
    if len(values) == 1:
        return dict.fromkeys(("low", "median", "high"), values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": middle, "high": high}


def measure(
    workload: Workload, names: Sequence[str], modes: Sequence[str], steps: int, warmup: int = 3
) -> dict[str, Any]:
    """Time the models in turns, mode by mode.

    Args:
        workload: What to compute.
        names: The models, of `PEERS`.
        modes: Of `MODES`; eager first where there are both.
        steps: Timed steps of every model.
        warmup: Steps in front of them.

    Returns:
        By mode, ``models`` with ``wall``, ``cpu`` (quartiles in seconds) and ``saved_mib`` by
        name, and ``ratios``: quartiles over the turns by pair ``a/b`` and clock, and the
        ratio of ``saved``.
    """
    runners = {name: Runner(name, workload) for name in names}
    report: dict[str, Any] = {}
    for mode in (mode for mode in MODES if mode in modes):
        if mode == "compiled":
            for runner in runners.values():
                runner.compile()
        report[mode] = _measure_mode(runners, steps, warmup)
        print(as_text({mode: report[mode]}), file=sys.stderr, flush=True)  # if the next never ends
    return report


def _measure_mode(runners: dict[str, Runner], steps: int, warmup: int) -> dict[str, Any]:
    for runner in runners.values():
        for _ in range(warmup):
            runner.step()
    saved = {name: round(runner.saved_bytes() / 2**20, 2) for name, runner in runners.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    order = list(runners)
    for _ in range(steps):
        for name in order:
            times[name].append(runners[name].timed_step())
        # No model always runs after the same one.
        order = order[1:] + order[:1] if len(times[order[0]]) % 2 else order[::-1]
    models = {
        name: {
            "wall": spread([wall for wall, _ in of_model]),
            "cpu": spread([cpu for _, cpu in of_model]),
            "saved_mib": saved[name],
        }
        for name, of_model in times.items()
    }
    ratios = {
        f"{a}/{b}": {
            clock: spread([x[i] / y[i] for x, y in zip(times[a], times[b], strict=True)])
            for i, clock in enumerate(CLOCKS)
        }
        | {"saved": saved[a] / saved[b]}
        for a, b in RATIOS
        if a in runners and b in runners
    }
    return {"models": models, "ratios": ratios}


def as_text(report: dict[str, Any]) -> str:
    """Lay a report of `measure` out as tables: models, then ratios as median and quartiles."""
    parts = []
    for mode, found in report.items():
        rows = [
            [
                name,
                *(f"{1e3 * row[clock]['median']:.1f}" for clock in CLOCKS),
                str(row["saved_mib"]),
            ]
            for name, row in found["models"].items()
        ]
        parts.append(text_table([mode, "wall ms", "CPU ms", "saved MiB"], rows))
        rows = [
            [pair, *(_cell(row[clock]) for clock in CLOCKS), f"{row['saved']:.3f}"]
            for pair, row in found["ratios"].items()
        ]
        if rows:
            parts.append(text_table(["ratio", "wall", "CPU", "saved"], rows))
    return "\n\n".join(parts)


def _cell(quartiles: dict[str, float]) -> str:
    return f"{quartiles['median']:.3f} ({quartiles['low']:.3f}-{quartiles['high']:.3f})"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the ratios of CPU time as bars with their quartiles, mode by mode."""
    pairs = list(next(iter(report.values()))["ratios"])
    figure = new_figure(1.2 * max(4, len(pairs)) + 1, 3.6)
    axes = figure.subplots()
    width = 0.8 / len(report)
    for i, (mode, found) in enumerate(report.items()):
        cells = [found["ratios"][pair]["cpu"] for pair in pairs]
        middle = [cell["median"] for cell in cells]
        below = [cell["median"] - cell["low"] for cell in cells]
        above = [cell["high"] - cell["median"] for cell in cells]
        at = [n + i * width for n in range(len(pairs))]
        axes.bar(at, middle, width, yerr=[below, above], capsize=4, label=mode)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(pairs))], pairs, fontsize=TEXT)
    axes.set_ylabel("CPU time of a step, ratio")
    finish(figure, path, "ratios of median CPU times, with quartiles")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure, print a table or JSON, and draw the picture if there is a path for it."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--flavor", choices=sorted(FLAVORS["cola"]), default="60M")
    parser.add_argument("--layers", type=int, default=0, help="blocks; 0 is the flavor's number")
    parser.add_argument("--vocab_size", type=int, default=0, help="vocabulary; 0 is the flavor's")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads on a CPU")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of every model")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps of every model")
    parser.add_argument("--models", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    parser.add_argument("--out", type=Path, help="picture of the ratios (PNG)")
    options = parser.parse_args(argv)
    minima = {
        "layers": 0,
        "vocab_size": 0,
        "batch": 1,
        "seq_len": 1,
        "threads": 1,
        "steps": 1,
        "warmup": 1,
    }
    check_at_least(options, **minima)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got 'cuda', expected 'cpu', the only device here")
    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        keep_freed_memory()  # as training does
    dtype, device = getattr(torch, options.dtype), options.device
    workload = Workload(
        options.flavor,
        options.batch,
        options.seq_len,
        options.layers,
        options.vocab_size,
        dtype,
        device,
    )
    modes = measure(workload, options.models, options.modes, options.steps, options.warmup)
    head = {**machine(device), "cores": os.cpu_count()}
    if options.json:
        asked = {key: str(value) for key, value in vars(options).items()}
        print(json.dumps({**head, "options": asked, "modes": modes}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in head.items()), as_text(modes), sep="\n")
    if options.out is not None:
        draw(modes, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
