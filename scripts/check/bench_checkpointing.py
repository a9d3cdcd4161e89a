#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time what activation checkpointing costs per eager block and step, on tiny tensors.

The tensors are so small that the host's work is all there is. Models without checkpointing, with
torch's whole-block checkpointing and with low-rank checkpointing take steps in turn. Times are CPU
time of the process, which other programs on the machine change less than wall time.

    python scripts/check/bench_checkpointing.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from statistics import median, quantiles
from typing import TYPE_CHECKING

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchtitan_lr.models.llama import LlamaModel

FORMS = ("none", "full", "low_rank", "low_rank, attention saved")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time every form; print the table or its JSON."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--family", default="cola", choices=["svd", "cola", "lax"])
    parser.add_argument("--layers", type=int, default=4, help="blocks")
    parser.add_argument("--width", type=int, default=64, help="of the model; a quarter is the rank")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each form")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    options = parser.parse_args(argv)
    parser.check_at_least(options, layers=1, width=32, steps=2)
    report = _report(options)
    print(json.dumps(report, indent=2) if options.json else _as_text(report))
    return 0


def _report(options: argparse.Namespace) -> dict[str, object]:
    import torch  # imported late: --help needs no torch

    torch.set_num_threads(1)
    steps = {form: _step(_build(options, form)) for form in FORMS}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for step in steps.values():
        step()
        step()
    for _ in range(options.steps):
        for form, step in steps.items():
            begin = time.process_time()
            step()
            times[form].append(1e3 * (time.process_time() - begin) / options.layers)
    rows = {}
    for form, found in times.items():
        extra = [t - plain for t, plain in zip(found, times["none"], strict=True)]
        low, _, high = quantiles(extra, n=4)
        row = {"step_ms": median(found), "extra_ms": median(extra), "low": low, "high": high}
        rows[form] = row
    return {"family": options.family, "load": os.getloadavg()[0], "per_block": rows}


def _build(options: argparse.Namespace, form: str) -> LlamaModel:
    import torch
    from torch.utils.checkpoint import checkpoint

    from torchtitan_lr.compat.autograd import checkpoint_wrapper
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.models.families.registry import FAMILIES
    from torchtitan_lr.models.llama import LlamaModel
    from torchtitan_lr.parallel.recompute.low_rank_checkpoint import apply_low_rank_checkpoint

    width, rank = options.width, options.width // 4
    model = LlamaModel(
        LlamaArgs(
            dim=width,
            n_layers=options.layers,
            n_heads=4,
            n_kv_heads=4,
            ffn_dim=2 * width,
            vocab_size=64,
            max_seq_len=16,
            family=options.family,
            rank_attention=rank,
            rank_ffn=rank,
            activation=FAMILIES[options.family].defaults("debug")["activation"],
        )
    )
    torch.manual_seed(0)
    model.init_weights()
    if form == "full":
        for name, block in model.layers.named_children():
            wrapped = checkpoint_wrapper(block, checkpoint_fn=checkpoint, use_reentrant=False)
            model.layers.register_module(name, wrapped)
    elif form != "none":
        apply_low_rank_checkpoint(model, save_attention=form != "low_rank")
    return model


def _step(model: LlamaModel) -> Callable[[], None]:
    import torch

    from torchtitan_lr.models.loss import cross_entropy_sum

    tokens = torch.arange(32).view(2, 16)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        cross_entropy_sum(model(tokens), tokens).backward()

    return step


def _as_text(report: dict[str, object]) -> str:
    rows: dict[str, dict[str, float]] = report["per_block"]  # type: ignore[assignment]
    table = [
        [form, f"{r['step_ms']:.2f}", f"{r['extra_ms']:.2f} ({r['low']:.2f}-{r['high']:.2f})"]
        for form, r in rows.items()
    ]
    head = ["checkpointing", "ms per block and step", "more than none (quartiles)"]
    return f"{text_table(head, table)}\n{report['family']}, load {report['load']:.0f}"


if __name__ == "__main__":
    sys.exit(main())
