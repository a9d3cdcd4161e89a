# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Time one decoder block of a T-way split on one device, plan by plan.

Without torchrun, the script runs rank 0 of T with a fake process group and measures the compute of
one rank, next to the device's own matmul ceiling. Under torchrun the collectives are real and the
ranks are torchrun's:

    python -m scripts.bench.block --flavor 7B --ranks 4 --compile
    torchrun --nproc_per_node=4 -m scripts.bench.block \
        --device cpu --flavor 60M --dtype float32

Times are medians over the steps, in milliseconds; on a GPU a queue of calls is waited for once.
TFLOP/s counts the block's own products (tests/oracle/flops.py) divided by T; what a plan repeats on
every rank counts once. Memory is the memory allocated between forward and backward; checkpointing
is rated by the memory it frees per added millisecond. Without a CUDA device the script prints a
note and exits, unless --device cpu is given.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.bench.harness import median_ms
from tests.oracle.flops import layer_flops
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel, Rows
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint
from torchtitan_lr.parallel.parallelize import apply_compile
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, apply_tensor_parallel, resolve_settings

Row: TypeAlias = dict[str, Any]
"""Measurements of one variant by name; None if not measured."""


@dataclass(frozen=True)
class Variant:
    """One row: a family, a plan, and whether low-rank checkpointing saves attention's output."""

    family: Any
    settings: TPSettings
    checkpoint: str = ""


VARIANTS = {
    "full": Variant("full", TPSettings("megatron")),
    "vanilla_replicated": Variant("cola", TPSettings("vanilla_replicated")),
    "vanilla": Variant("cola", TPSettings("vanilla")),
    "btp_ungrouped": Variant("cola", TPSettings("btp", grouping=False)),
    "btp": Variant("cola", TPSettings("btp")),
    "btp_sync": Variant("cola", TPSettings("btp", norm="sync")),
    "btp_sequence": Variant("cola", TPSettings("btp", comm="sequence")),
    "btp_low_rank_ac": Variant("cola", TPSettings("btp"), "recompute"),
    "btp_low_rank_ac_keep_attention": Variant("cola", TPSettings("btp"), "keep"),
}


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time the variants and print a table, or JSON."""
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device here (--device cpu times this processor instead)")
        return 0
    with joined(options) as mesh:
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "options": vars(options),
            "matmul_tflops": _matmul_ceiling(options),
            "variants": {},
        }
        for name in options.only:
            row = measure(calls_of(VARIANTS[name], mesh, options), options)
            report["variants"][name] = row
            print(name, row, file=sys.stderr, flush=True)  # if the next never ends
        _rate_checkpointing(report["variants"])
        if dist.get_rank() == 0:
            print(json.dumps(report, indent=2) if options.json else _table(report))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--flavor", choices=sorted(FLAVORS["cola"]), default="7B", help="flavor of the model"
    )
    parser.add_argument("--ranks", type=int, default=4, help="T; ignored under torchrun")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--seq_len", type=int, default=4096, help="tokens per sequence")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the block"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device to run on"
    )
    parser.add_argument("--compile", action="store_true", help="compile the block")
    parser.add_argument("--steps", type=int, default=20, help="timed repetitions")
    parser.add_argument("--warmup", type=int, default=3, help="untimed repetitions")
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="only these rows"
    )
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    options = parser.parse_args(argv)
    for key in ("ranks", "batch", "seq_len", "steps"):
        if getattr(options, key) < 1:
            parser.error(f"--{key} must be at least 1")
    return options


@contextmanager
def joined(options: argparse.Namespace) -> Iterator[DeviceMesh]:
    """Be in torchrun's process group, or in a fake one of `--ranks` ranks; its mesh."""
    launched = "WORLD_SIZE" in os.environ
    with _torchrun(options) if launched else fake_process_group(options.ranks):
        yield init_device_mesh(options.device, (options.ranks,), mesh_dim_names=("tp",))


@contextmanager
def _torchrun(options: argparse.Namespace) -> Iterator[None]:
    """Be in torchrun's process group, whose size replaces `--ranks`."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    options.ranks = dist.get_world_size()
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Calls:
    """A block of one variant, ready to run.

    Args:
        args: Its shape.
        x: The input, whose gradient `both` leaves behind.
        forward: The forward pass.
        both: Forward and backward.
    """

    args: LlamaArgs
    x: torch.Tensor
    forward: Callable[[], torch.Tensor]
    both: Callable[[], None]


def calls_of(variant: Variant, mesh: DeviceMesh, options: argparse.Namespace) -> Calls:
    """Build the block of one variant."""
    args = replace(FLAVORS[variant.family][options.flavor], n_layers=1)
    args.max_seq_len = options.seq_len
    settings = resolve_settings(variant.settings, args, options.ranks, options.seq_len)
    model = _build(args, settings, variant, mesh, options)
    block = model.layers["0"]
    x = _input(args, settings, options)
    cotangent = torch.randn_like(x)

    def forward() -> torch.Tensor:
        out: torch.Tensor = block(x, Rows(torch.view_as_real(model.freqs_cis)))[0]
        return out

    def both() -> None:
        block.zero_grad()
        x.grad = None
        forward().backward(cotangent)

    return Calls(args, x, forward, both)


def measure(calls: Calls, options: argparse.Namespace) -> Row:
    """Return times (ms), TFLOP/s and activation memory (MiB) of a block."""
    flops = layer_flops(calls.args, options.seq_len).total * options.batch / options.ranks
    forward_ms, both_ms = (_time(call, options) for call in (calls.forward, calls.both))
    return {
        "forward_ms": forward_ms,
        "forward_backward_ms": both_ms,
        "tflops": flops / both_ms / 1e9,
        "activation_mib": _activation_memory(calls.forward, options),
    }


def _build(
    args: LlamaArgs,
    settings: TPSettings,
    variant: Variant,
    mesh: DeviceMesh,
    options: argparse.Namespace,
) -> LlamaModel:
    torch._dynamo.reset()
    model = empty_model(args).to(getattr(torch, options.dtype))
    apply_tensor_parallel(model, mesh, settings)
    if variant.checkpoint:
        apply_low_rank_checkpoint(model, variant.checkpoint == "keep")
    if options.compile:
        apply_compile(model, "inductor")
    model.tok_embeddings, model.output = None, None
    model.to_empty(device=options.device)
    model.init_weights()
    return model


def _input(args: LlamaArgs, settings: TPSettings, options: argparse.Namespace) -> torch.Tensor:
    """Return this rank's part of a random stream: (b, s, d/T), (b, s/T, d) or (b, s, d)."""
    s, d, t = options.seq_len, args.dim, options.ranks
    if PLANS[settings.plan].shards_stream:
        d //= t
    elif settings.comm == "sequence":
        s //= t
    dtype = getattr(torch, options.dtype)
    return torch.randn(options.batch, s, d, dtype=dtype, device=options.device, requires_grad=True)


def _time(run: Callable[[], object], options: argparse.Namespace) -> float:
    """Return the median time of a call in milliseconds."""
    # Ranks on CPUs begin each call together; on GPUs a barrier would be part of the time.
    together = dist.barrier if "WORLD_SIZE" in os.environ else None
    return median_ms(run, options.device, options.steps, options.warmup, together)


def _activation_memory(forward: Callable[[], object], options: argparse.Namespace) -> float | None:
    """Return the MiB that forward leaves allocated; None if the device does not count them."""
    if options.device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept / 2**20


def _matmul_ceiling(options: argparse.Namespace) -> float:
    """Return the TFLOP/s of a large square product on this device."""
    n = 8192 if options.device == "cuda" else 512
    a, b = (
        torch.randn(n, n, dtype=getattr(torch, options.dtype), device=options.device)
        for _ in range(2)
    )
    return 2 * n**3 / _time(lambda: a @ b, options) / 1e9


def _rate_checkpointing(variants: dict[str, Row]) -> None:
    plain = variants.get("btp")
    for name, row in variants.items():
        if plain and name.startswith("btp_low_rank_ac") and row["activation_mib"] is not None:
            freed = plain["activation_mib"] - row["activation_mib"]
            added = row["forward_backward_ms"] - plain["forward_backward_ms"]
            row["freed_mib_per_ms"] = freed / added if added > 0 else None


def _table(report: dict[str, Any]) -> str:
    ceiling = report["matmul_tflops"]
    title = f"{report['device']}, torch {report['torch']}, matmul ceiling {ceiling:.3g} TFLOP/s"
    header = ["variant", "fwd ms", "fwd+bwd ms", "TFLOP/s", "of ceiling", "act. MiB", "MiB/ms"]
    lines = []
    for name, row in report["variants"].items():
        cells = [name, f"{row['forward_ms']:.2f}", f"{row['forward_backward_ms']:.2f}"]
        cells += [f"{row['tflops']:.3g}", f"{row['tflops'] / ceiling:.0%}"]
        sizes = (row["activation_mib"], row.get("freed_mib_per_ms"))
        lines.append([*cells, *("-" if size is None else f"{size:.1f}" for size in sizes)])
    return f"{title}\n{text_table(header, lines)}"


if __name__ == "__main__":
    sys.exit(main())
