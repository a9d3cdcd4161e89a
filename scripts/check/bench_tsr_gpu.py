# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time TSR-Adam's optimizer step and fused AdamW's on one GPU, for the paper's models.

The model is llama_full with random gradients; there is no forward pass. A plain step is
`accumulate`, `synchronize`, `clip` and `step`; a refresh step also computes all bases. Without a
GPU the script prints a note and exits with 0.

    python scripts/check/bench_tsr_gpu.py --flavors 350M 1B
"""

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.optim.tsr.selection import TSRSettings

PAPER = {"60M": (256, 64), "130M": (384, 96), "350M": (384, 128), "1B": (512, 256)}
"""Rank and embedding rank."""

DEFAULTS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def main(argv: list[str] | None = None) -> int:
    """Measure each flavor and print one JSON object."""
    options = _parse(argv)
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "tf32": options.tf32}
    for flavor in options.flavors:
        report[flavor] = _measure(flavor, options.repeats)
    print(json.dumps(report, indent=2))
    return 0


def _measure(flavor: str, repeats: int) -> dict[str, Any]:
    model = _build(flavor)
    gradients = [torch.randn_like(p) * 1e-3 for p in model.parameters()]
    result: dict[str, Any] = {"adamw": _measure_adamw(model, gradients, repeats)}
    result["tsr"] = _measure_tsr(model, gradients, flavor, repeats)
    return result


def _build(flavor: str) -> nn.Module:
    with torch.device("meta"):
        model = LlamaModel(FLAVORS["full"][flavor])
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def _give(model: nn.Module, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def _measure_adamw(
    model: nn.Module, gradients: list[torch.Tensor], repeats: int
) -> dict[str, float]:
    before = _memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        _give(model, gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True)
        optimizer.step()

    seconds = _time(step, repeats)
    result = {"step_ms": seconds, "state_GiB": _memory() - before}
    optimizer.state.clear()
    return result


def _measure_tsr(
    model: nn.Module, gradients: list[torch.Tensor], flavor: str, repeats: int
) -> dict[str, float]:
    before = _memory()
    rank, embedding_rank = PAPER[flavor]
    settings = TSRSettings(rank=rank, embedding_rank=embedding_rank, refresh_interval=10**9)
    optimizer = TSROptimizers([model], settings, dict(DEFAULTS))
    state = _memory() - before

    def step() -> None:
        _give(model, gradients)
        optimizer.accumulate(last=True)
        norm = optimizer.synchronize()
        optimizer.clip(1e9, norm)
        optimizer.step()

    def refresh() -> None:
        for matrices in optimizer.synchronizer.stacks:
            matrices.refreshes.zero_()  # as at the start: all matrices refresh
        step()

    torch.cuda.reset_peak_memory_stats()
    result = {"refresh_ms": _time(refresh, max(2, repeats // 10)), "state_GiB": state}
    result["refresh_peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30 - before
    torch.cuda.reset_peak_memory_stats()
    result["step_ms"] = _time(step, repeats)
    result["step_peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30 - before
    return result


def _time(function: Callable[[], None], repeats: int) -> float:
    """Return the median milliseconds of one call, after a warm-up call."""
    times = []
    for index in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if index:
            times.append(start.elapsed_time(end))
    return median(times)


def _memory() -> float:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / 2**30


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--flavors", nargs="+", default=["350M", "1B"], choices=list(PAPER))
    parser.add_argument("--repeats", type=int, default=20, help="steps timed")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in matrix products")
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, expected at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
