# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""A GPU day in one command: parity and times of all parts on one device.

    python -m scripts.bench.gpu --out outputs/gpu.json            # on one GPU
    python -m scripts.bench.gpu --device cpu --small              # a rehearsal without a GPU

Nothing is fetched. The parts:

    parity    every family in bf16 and in TF32 against fp64 on the CPU: loss, and the largest error
              of a gradient over its largest entry
    training  CoLA and full rank, eager and compiled: tokens/s, MFU, and the peak memory of none,
              low_rank and full activation checkpointing
    optimizer TSR-Adam's plain and refresh step against fused AdamW's
    spectral  a step of Muon, Spectron and LoRA-Muon for the factors of CoLA's blocks, beside AdamW,
              torch's Muon (products in bf16), and Muon by the usual five iterations in fp32
    block     a decoder block of one rank of four, compiled: BTP's forward and backward beside full
              rank's at two batches, and its longest kernels; nothing is sent
    captured  the same of full rank and BTP at one and four rows, plain and as one CUDA graph
    modes     a block of CoLA, compiled by default, with deferred norms, grouped, and autotuned
    context   attention at 8B of one of the ranks that share a row of 32k or 128k tokens, beside a
              C-th of a whole row's on one device; nothing is sent
    split     the same by kernel: cuDNN in two calls per chunk, flash in one
    profile   the kernels of one compiled step of CoLA, the longest first
    padded    a compiled step of CoLA and full rank at 1B, whose feed-forward width is odd: padded
              where products use it, and not

Every row is printed, and written to --out, as it ends: a time limit costs the rows after it.

Exit status: 0 all parts ran and parity holds, 1 not, 2 invalid arguments.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_lr.training.register  # noqa: F401
from scripts.bench import block as bench_block
from scripts.bench.deferred import defer_norms, group_products
from scripts.bench.harness import in_turns, machine, median_ms, relative_error, timed_rows
from scripts.bench.peers import Runner, Workload
from scripts.bench.spectral import factors_of, our_optimizer
from tests.oracle.flops import flops_per_token
from tests.reference.muon import UsualMuon
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.compat import prefix_attention
from torchtitan_lr.compat.dispatch import remake_inputs_of_products
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import Attend, LlamaModel, Rows, build_freqs_cis
from torchtitan_lr.optim.spectral.rules import RULES
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.parallel.checkpoint_modes import apply_activation_checkpoint
from torchtitan_lr.parallel.context import GatheredAttention, attend_to_prefix, own_chunks
from torchtitan_lr.titan.device import peak_flops

LIMITS = {"bfloat16": 6e-2, "tf32": 6e-3, "float32": 1e-4}
"""Largest error of a gradient. bf16 has 2^-9 and TF32 2^-11 per rounding; two blocks and the head
add about twenty of them, and a wrong product gives errors near 1."""

Row = dict[str, Any]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Let fp32 products have a precision of `torch.set_float32_matmul_precision` in this block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def parity_errors(family: str, precision: str, device: str) -> dict[str, float]:
    """Compare a small model's loss and gradients with fp64 on the CPU.

    Args:
        family: The family.
        precision: ``bfloat16``, ``tf32`` or ``float32``.
        device: ``cpu`` or ``cuda``.

    Returns:
        ``loss`` and ``gradient``: relative errors, the latter the largest over all parameters of
        max|a - b| / max|b|.
    """
    args = replace(FLAVORS[family]["debug"], n_layers=2, max_seq_len=64)
    tokens = torch.randint(args.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))

    def results(dtype: torch.dtype, where: str) -> tuple[float, dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        model = LlamaModel(args)
        model.init_weights()
        # Weights that bf16 holds exactly, so that only the computation differs.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
        model.to(where)
        x = tokens.to(where)
        loss = model(x[:, :-1].contiguous(), targets=x[:, 1:].contiguous()) / (x.numel() - 2)
        loss.backward()
        gradients = {
            n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None
        }
        return loss.item(), gradients

    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    with matmul_precision("high" if precision == "tf32" else "highest"):
        loss, found = results(dtype, device)
    exact_loss, exact = results(torch.float64, "cpu")
    errors = [((found[n] - g).abs().max() / g.abs().max()).item() for n, g in exact.items()]
    return {"loss": abs(loss - exact_loss) / exact_loss, "gradient": max(errors)}


def parity(device: str, small: bool) -> Iterator[Row]:
    """Yield the errors of every family and precision."""
    precisions = ("bfloat16", "tf32") if device == "cuda" else ("bfloat16", "float32")
    for family in FAMILIES:
        for precision in precisions:
            errors = parity_errors(family, precision, device)
            holds = errors["gradient"] < LIMITS[precision]
            yield {"family": family, "precision": precision, **errors, "holds": holds}


TRAINING = (
    ("cola", "1B", "compiled", "none"),
    ("full", "1B", "compiled", "none"),
    ("cola", "1B_boost", "compiled", "none"),
    ("full", "1B_boost", "compiled", "none"),
    ("cola", "1B", "compiled", "low_rank"),
    ("cola", "1B", "eager", "none"),
    ("full", "1B", "eager", "none"),
    ("cola", "1B", "eager", "low_rank"),
    ("cola", "1B", "eager", "full"),
    ("full", "1B", "eager", "full"),
)
"""Family, flavor, mode and activation checkpointing of each row of `training`. The 1B of CoLA's
paper has an odd feed-forward width, 5461; BOOST's has 5472, a multiple of 32."""


def training(device: str, small: bool) -> Iterator[Row]:
    """Yield tokens/s, MFU and peak memory of training steps (bf16 on a GPU)."""
    for family, flavor, mode, checkpointing in TRAINING:
        _reset(device)
        workload = _workload(device, small, flavor)
        tokens = workload.batch * workload.seq_len
        runner = Runner(family, workload)
        config = build_job_config([f"--activation_checkpoint.mode={checkpointing}"])
        apply_activation_checkpoint(runner.model, config)
        if mode == "compiled":
            runner.compile()
        milliseconds = median_ms(runner.step, device, 3)
        row: Row = {"family": family, "flavor": workload.flavor, "mode": mode}
        row["checkpointing"] = checkpointing
        row |= {"ms": milliseconds, "tokens_per_s": 1e3 * tokens / milliseconds}
        if device == "cuda":
            flops = flops_per_token(workload.args(family), workload.seq_len)
            row["mfu"] = row["tokens_per_s"] * flops / peak_flops(torch.cuda.get_device_name())
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        del runner
        yield row


def _workload(device: str, small: bool, flavor: str) -> Workload:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = ("debug", 2, 32) if small else (flavor, 8, 1024)
    return Workload(*shape, dtype=dtype, device=device)


PADDED = (("cola", 8), ("full", 8), ("cola", 24), ("full", 24))
"""Family and rows of 1,024 tokens of each group of `padded`."""


def padded(device: str, small: bool) -> Iterator[Row]:
    """Yield compiled training steps whose odd feed-forward width is padded at use, or not.

    One model takes turns with itself. ``speed_up`` is over the first, which is not padded;
    ``loss_difference`` is relative, between two passes with the same weights.
    """
    for family, batch in PADDED[:2] if small else PADDED:
        _reset(device)
        workload = _workload(device, small, "1B")
        workload = replace(workload, ffn_dim=341) if small else replace(workload, batch=batch)
        runner = Runner(family, workload)
        runner.compile()
        modules = [m for m in runner.model.modules() if getattr(m, "pads", False) is None]
        plain, other = (_padding(modules, on, runner.forward).item() for on in (False, True))
        step = partial(_padding, modules)
        calls = {f"padded {on}": partial(step, on, runner.step) for on in (False, True)}
        timed = in_turns(calls, 2 if small else 5, warmup=2)
        flops = flops_per_token(workload.args(family), workload.seq_len)
        tokens = runner.tokens.numel()
        for name, found in timed.items():
            row: Row = {"family": family, "f": workload.args(family).ffn_dim, "tokens": tokens}
            row |= {"how": name, **found.as_dict(), "loss_difference": abs(other / plain - 1)}
            row["tokens_per_s"] = 1e3 * tokens / row["ms"]
            if device == "cuda":
                row["mfu"] = row["tokens_per_s"] * flops / peak_flops(torch.cuda.get_device_name())
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            yield row
        del runner, calls


def _padding(modules: list[Any], on: bool, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call what pads odd widths, or not."""
    for module in modules:
        module.pads = on
    return call()


def profile(device: str, small: bool) -> Iterator[Row]:
    """Yield the 25 longest kernels of one compiled step of CoLA, and their sum over all."""
    _reset(device)
    runner = Runner("cola", _workload(device, small, "1B"))
    runner.compile()
    yield {"kernel": "a step by the clock, unprofiled", "ms": median_ms(runner.step, device, 3)}
    yield from _kernels(runner.timed_step, device)


def _kernels(call: Callable[[], object], device: str, longest: int = 25) -> Iterator[Row]:
    """Profile a call that waits for the device: all kernels together, then the longest."""
    cuda = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
    kernels = [*_on_device(profiler.key_averages(), cuda)]
    kernels.sort(key=lambda kernel: -kernel["ms"])
    calls, busy_ms = (sum(kernel[key] for kernel in kernels) for key in ("calls", "ms"))
    yield {"kernel": "all kernels", "calls": calls, "ms": busy_ms, "share": 1.0}
    for kernel in kernels[:longest]:
        yield {**kernel, "share": kernel["ms"] / busy_ms}


def _on_device(events: Iterable[Any], cuda: bool) -> Iterator[Row]:
    """Yield the events that took time on the device.

    A profile of CUDA alone holds the host's calls of CUDA too, which are no kernels, and the marks
    of `record_function`, which contain kernels.
    """
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    for event in events:
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            spent = event.self_device_time_total if cuda else event.self_cpu_time_total
            yield {"kernel": event.key[:90], "calls": event.count, "ms": spent / 1e3}


def optimizer(device: str, small: bool) -> Iterator[Row]:
    """Yield the milliseconds of steps of fused AdamW and TSR-Adam, clipping included.

    Each step first copies the gradients, which the first row times alone. TSR-Adam's products are
    in TF32, as in a run whose model computes in bf16.
    """
    flavor, rank, embedding_rank = ("debug", 16, 16) if small else ("1B", 512, 256)
    model = empty_model(FLAVORS["full"][flavor]).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    gradients = [torch.randn_like(p) * 1e-3 for p in model.parameters()]

    def give() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()

    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    settings = TSRSettings(rank=rank, embedding_rank=embedding_rank, refresh_interval=10**9)
    tsr = TSRAdam(model.named_parameters(), settings, lr=1e-4, weight_decay=0.01)

    def adamw_step() -> None:
        give()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True)
        adamw.step()

    def tsr_step() -> None:
        tsr.begin()
        with tsr.micro_batch(last=True):
            give()
        tsr.clip(1e9, tsr.finish_sums().sqrt())
        tsr.step()

    def refresh() -> None:
        for stack in tsr.stacks:
            stack.refresh_counts.zero_()  # as at the start: all matrices refresh
        tsr_step()

    with matmul_precision("high"):
        yield {"optimizer": "copying the gradients", "ms": median_ms(give, device, 3)}
        timed = in_turns({"AdamW": adamw_step, "TSR-Adam": tsr_step}, 3 if small else 10)
        for name, found in timed.items():
            yield {"optimizer": name, **found.as_dict()}
        timed = in_turns({"refresh": refresh}, 1, warmup=1)
        milliseconds = timed["refresh"].as_dict()["ms"]
        yield {"optimizer": "TSR-Adam, refresh of all matrices", "ms": milliseconds}

        yield from _kernels(partial(_waited, tsr_step, device), device)
        yield from _kernels(partial(_waited, refresh, device), device)


def spectral(device: str, small: bool) -> Iterator[Row]:
    """Yield the milliseconds and the peak memory of a step of each optimizer of factors.

    Factors and gradients are drawn on the device. Clipping is not part of these steps.
    """
    flavor = "debug" if small else "1B_boost"
    builds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "AdamW": partial(torch.optim.AdamW, lr=1e-4, fused=True),
        "torch.optim.Muon": partial(torch.optim.Muon, lr=1e-4),
        "usual, fp32": partial(UsualMuon, lr=1e-4),
    }
    ours = {name: (name, "highest") for name in RULES}
    for name, rule in RULES.items():
        if rule.splits:  # as in a run whose model computes in bf16
            ours[f"{name}, split products"] = name, "high"
    for name in (*builds, *ours):
        _reset(device)
        factors, pairs = factors_of(flavor, 0, device)
        if name in builds:
            step = builds[name]([*factors.values()]).step
        else:
            rule_name, precision = ours[name]
            step = matmul_precision(precision)(our_optimizer(rule_name, factors, pairs).step)
        row: Row = {"optimizer": name, "flavor": flavor}
        row["ms"] = median_ms(step, device, 3 if small else 10)
        if device == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        del factors, step
        yield row


BLOCKS = ("full", "vanilla", "btp", "btp_low_rank_ac_keep_attention")
"""Rows of `block`; their speed-up is over the first."""


def block(device: str, small: bool) -> Iterator[Row]:
    """Yield the milliseconds of a block of one rank of four, and its longest kernels."""
    _reset(device)
    shape = ["--flavor=debug", "--seq_len=32", "--steps=1", "--dtype=float32"]
    if not small:
        shape = ["--flavor=7B", "--seq_len=4096", "--steps=5", "--compile"]
    for batch in (1,) if small else (4, 16):
        options = bench_block.parse([f"--device={device}", f"--batch={batch}", *shape])
        first = None
        with bench_block.joined(options) as mesh:
            for name in BLOCKS:
                calls = bench_block.calls_of(bench_block.VARIANTS[name], mesh, options)
                row = bench_block.measure(calls, options)
                first = first or row["forward_backward_ms"]
                row["speed_up"] = first / row["forward_backward_ms"]
                yield {"variant": name, "batch": batch, **row}
                kernels = _kernels(partial(_waited, calls.both, device), device, 12)
                yield from ({"variant": name, "batch": batch, **kernel} for kernel in kernels)


def _waited(call: Callable[[], object], device: str) -> None:
    call()
    if device == "cuda":
        torch.cuda.synchronize()


def captured(device: str, small: bool) -> Iterator[Row]:
    """Yield the milliseconds of a block of one rank of four, plain and as one CUDA graph.

    All of one batch take turns; ``speed_up`` is over full rank, plain. ``equal`` says whether the
    graph leaves the input's gradient of the plain pass, bit by bit.
    """
    shape = ["--flavor=debug", "--seq_len=32", "--dtype=float32"]
    if not small:
        shape = ["--flavor=7B", "--seq_len=4096", "--compile"]
    for batch in (1, 4):
        _reset(device)
        options = bench_block.parse([f"--device={device}", f"--batch={batch}", *shape])
        calls: dict[str, Callable[[], object]] = {}
        equal: dict[str, bool] = {}
        with bench_block.joined(options) as mesh:
            # Both are built before one is compiled: building drops what is compiled.
            blocks = {
                name: bench_block.calls_of(bench_block.VARIANTS[name], mesh, options)
                for name in ("full", "btp")
            }
            for name, built in blocks.items():
                calls[f"{name}, plain"] = built.both
                built.both()  # compiles
                replay = _captured(built.both, device)
                _waited(replay, device)
                kept = built.x.grad  # the graph's own memory
                _waited(built.both, device)
                assert kept is not None and built.x.grad is not None
                how = "captured" if device == "cuda" else "plain again: no graph on a CPU"
                calls[f"{name}, {how}"] = replay
                equal[f"{name}, {how}"] = torch.equal(kept, built.x.grad)
            for row in timed_rows(calls, 2 if small else 10):
                yield {"batch": batch, **row, "equal": equal.get(row["how"])}
        del calls, blocks, built, replay, kept


def _captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """Return what replays a call as one CUDA graph with memory of its own; the call on a CPU."""
    if device == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def modes(device: str, small: bool) -> Iterator[Row]:
    """Yield forward and backward of one block of CoLA `1B_boost`, compiled in several ways.

    ``errors`` are those of the output and of the input's gradient against fp32; ``kernels`` and
    ``kernels_ms`` come from a profile. Autotuning takes longest, so that its rows are the last.
    """
    _reset(device)
    workload = _workload(device, small, "1B_boost")
    model = LlamaModel(replace(workload.args("cola"), n_layers=1, vocab_size=256))
    model.init_weights()
    model.to(device)
    block = model.layers["0"].to(workload.dtype)
    table = torch.view_as_real(model.freqs_cis)
    shape = (workload.batch, workload.seq_len, model.model_args.dim)
    x, upstream = (torch.randn(shape, device=device, dtype=workload.dtype) for _ in range(2))
    x.requires_grad_()
    exact = _block_pass(deepcopy(block).float(), table, x.detach().float(), upstream.float())
    remake_inputs_of_products(True)  # as a run does
    with fake_process_group(1):
        alone = Ranks.of(init_device_mesh(device, (1,)))
        changes: dict[str, tuple[Callable[[nn.Module], None], str | None]] = {
            "default": (lambda _: None, None),
            "deferred norm": (defer_norms, None),
            "deferred norm, grouped B": (partial(group_products, alone=alone), None),
            "max-autotune without graphs": (lambda _: None, "max-autotune-no-cudagraphs"),
        }
        ways: dict[str, Callable[[], object]] = {}
        for name, (change, mode) in changes.items():
            changed = deepcopy(block)
            change(changed)
            changed.compile(mode=mode)
            ways[name] = partial(_block_pass, changed, table, x, upstream)
        *first, last = ways
        for names in (first, ["default", last]):
            for row in timed_rows({name: ways[name] for name in names}, 2 if small else 8):
                if "ms" in row:
                    found: Any = ways[row["how"]]()
                    pairs = zip(found, exact, strict=True)
                    row["errors"] = [relative_error(a, b.double()) for a, b in pairs]
                    all_kernels = next(_kernels(partial(_waited, ways[row["how"]], device), device))
                    row |= {"kernels": all_kernels["calls"], "kernels_ms": all_kernels["ms"]}
                yield row


def _block_pass(
    block: nn.Module, table: torch.Tensor, x: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block's output and the gradient of its input; those of its weights are computed."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    out, _ = block(x, Rows(table))
    out.backward(upstream)
    assert x.grad is not None
    return out.detach(), x.grad


CONTEXTS = ((4, 32_768), (16, 131_072))
"""Ranks C that share a row, and its tokens, of each row of `context`."""


def context(device: str, small: bool) -> Iterator[Row]:
    """Yield the milliseconds of attention, forward and backward, and its longest kernel.

    Each row has both of rank 0 of C, and of one device with the whole row.

    The keys and values of the other ranks are not there: a fake group gathers whatever its memory
    holds. The attention that trains is timed, with its copies and rotary positions.
    """
    args, dtype = FLAVORS["cola"]["8B"], torch.bfloat16
    if small:
        args = FLAVORS["cola"]["debug"]
    if device == "cpu":
        dtype = torch.float32
    for degree, tokens in ((4, 64),) if small else CONTEXTS:
        _reset(device)
        table = torch.view_as_real(
            build_freqs_cis(args.head_dim, tokens, args.rope_theta, args.rope_scaling)
        ).to(device)
        whole_ms, whole_kernel = _attention_ms(Attend(args.head_dim), args, table, dtype)
        with fake_process_group(degree):
            ranks = Ranks.of(init_device_mesh(device, (degree,)))
            own_table = own_chunks(table, ranks, 0)
            shared = GatheredAttention(ranks, args.head_dim)
            milliseconds, kernel = _attention_ms(shared, args, own_table, dtype)
        yield {
            "tokens": tokens,
            "ranks": degree,
            "whole_row_ms": whole_ms,
            "whole_row_kernel": whole_kernel,
            "ms": milliseconds,
            "over_a_share": milliseconds * degree / whole_ms,
            "kernel": kernel,
        }


def _attention_ms(
    attention: nn.Module, args: LlamaArgs, table: torch.Tensor, dtype: torch.dtype
) -> tuple[float, str]:
    """Time attention of the tokens of a rotary table; return the name of its longest kernel too."""
    device = table.device.type
    widths = args.dim, args.kv_dim, args.kv_dim
    q, k, v = (
        torch.randn(1, len(table), width, device=device, dtype=dtype, requires_grad=True)
        for width in widths
    )

    upstream = torch.randn_like(attention(q, k, v, Rows(table)))

    def both() -> None:
        torch.autograd.grad(attention(q, k, v, Rows(table)), (q, k, v), upstream)
        if device == "cuda":
            torch.cuda.synchronize()

    milliseconds = median_ms(both, device, 1, warmup=1)
    _, longest, *_ = _kernels(both, device)
    return milliseconds, longest["kernel"]


def split(device: str, small: bool) -> Iterator[Row]:
    """Yield a rank's attention of a shared row by kernel.

    ``over_a_share`` is the time times C over the whole row's on one device; ``errors`` are those of
    output and gradients of q, k and v of the last chunk against flash's, or a CPU's with a mask.
    """
    args = FLAVORS["cola"]["debug" if small else "8B"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    degree, tokens = (4, 64) if small else CONTEXTS[0]
    kernels = ["cudnn", "flash"] if device == "cuda" else ["cpu"]
    _reset(device)
    table = torch.view_as_real(
        build_freqs_cis(args.head_dim, tokens, args.rope_theta, args.rope_scaling)
    ).to(device)
    with fake_process_group(degree):
        ranks = Ranks.of(init_device_mesh(device, (degree,)))
        own_table = own_chunks(table, ranks, 0)
        inputs = _attention_inputs(args, tokens // degree, device, dtype)
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, list[float]] = {}
        chunk = _chunk_inputs(args, tokens, degree, device, dtype)

        def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = prefix_attention.prefix_attention(q, k, v)[0]
            return out

        for name in kernels:
            attention = GatheredAttention(ranks, args.head_dim)
            attention.to_prefix = fused
            calls[name] = partial(_by, name, _attend_both, attention, own_table, *inputs)
            try:
                expected = _by("flash", _of_chunk, attend_to_prefix, *chunk)  # a CPU has a mask
                found = _by(name, _of_chunk, fused, *chunk)
                pairs = zip(found, expected, strict=True)
                errors[name] = [relative_error(a, b.double()) for a, b in pairs]
            except RuntimeError as error:
                yield {"how": f"errors of {name}", "failed": str(error)[:160]}
        row_inputs = _attention_inputs(args, tokens, device, dtype)
        whole = Attend(args.head_dim)
        calls["the whole row on one device"] = partial(_attend_both, whole, table, *row_inputs)
        rows = [*timed_rows(calls, 2 if small else 8)]
    whole_ms = rows[-1].get("ms", float("nan"))
    for row in rows:
        if "ms" in row and row is not rows[-1]:
            row["over_a_share"] = row["ms"] * degree / whole_ms
        yield {"tokens": tokens, "ranks": degree, **row, "errors": errors.get(row["how"])}


def _attention_inputs(
    args: LlamaArgs, tokens: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Draw q, k and v before rotation, and the gradient of the output (1, h, s, head_dim)."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    leaves = [draw(1, tokens, n, requires_grad=True) for n in (args.dim, *[args.kv_dim] * 2)]
    # As kernels lay their output out.
    return [*leaves, draw(1, tokens, args.n_heads, args.head_dim).transpose(1, 2)]


def _attend_both(
    attention: nn.Module, table: torch.Tensor, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    q, k, v, upstream = inputs
    return torch.autograd.grad(attention(q, k, v, Rows(table)), (q, k, v), upstream)


def _chunk_inputs(
    args: LlamaArgs, tokens: int, degree: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Draw q of a row's last chunk, k and v of the row, and the gradient of the output."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    own, heads, width = tokens // (2 * degree), args.n_heads, args.head_dim
    q = draw(1, heads, own, width, requires_grad=True)
    k, v = (draw(1, args.kv_heads, tokens, width, requires_grad=True) for _ in range(2))
    return [q, k, v, draw(1, own, heads, width).transpose(1, 2)]


def _by(kernel: str, call: Callable[..., Any], *args: Any) -> Any:
    def by(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[str, int]:
        return kernel, 0 if kernel == "flash" else k.shape[-2] - q.shape[-2]

    with patch.object(prefix_attention, "own_kernel", by):
        return call(*args)


def _of_chunk(to_prefix: Callable[..., Any], *chunk: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of q, k and v."""
    q, k, v, upstream = chunk
    out = to_prefix(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), upstream)]


PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        *(parity, training, optimizer, spectral, block, captured, modes, context, split),
        *(profile, padded),
    )
}


def _reset(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def as_text(report: dict[str, Any]) -> str:
    """Format the report as one table per part."""
    lines = [", ".join(f"{key} {value}" for key, value in report["machine"].items())]
    for part, rows in report["parts"].items():
        header = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[_cell(row.get(key)) for key in header] for row in rows]
        lines += ["", part, text_table(header, cells)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return "-" if value is None else str(value)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the tables, and write the JSON; return the exit status."""
    parser = OneLineParser(prog="scripts.bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run")
    parser.add_argument("--small", action="store_true", help="tiny models: a rehearsal")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which")
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    options: argparse.Namespace = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "cpu: there is no CUDA device here")
    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": machine(options.device), "parts": {}}
    for part in options.parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        rows = report["parts"][part] = []
        for row in PARTS[part](options.device, options.small):
            rows.append(row)
            print("   ", *(f"{key} {_cell(value)}" for key, value in row.items()), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(as_text(report))
    return (
        0 if all(row.get("holds", True) for rows in report["parts"].values() for row in rows) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
