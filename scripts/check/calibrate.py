#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure this machine for scripts/estimate.py, and write its hardware file.

    python scripts/check/calibrate.py --out here.toml            # one device
    torchrun --nproc_per_node 2 scripts/check/calibrate.py --out here.toml  # and its links
    python scripts/check/calibrate.py --out here.toml --steps 3  # and compare six steps with it
    python scripts/estimate.py CONFIG --hardware here.toml

Without torchrun the links are assumed: a quarter of the memory's bandwidth, 30 µs.

Times matrix products of many shapes, fused attention, element-wise kernels on large and on tiny
tensors, and with several ranks all-reduces. The speed of products is fitted to all shapes, with the
bandwidth and the time of a launch as measured. On a CPU the time is this process's CPU time with
one thread, so that other processes disturb it less, in fp32; on a GPU it is the device's, in bf16.

--steps measures N steps of six small models (family, width, batch), forward, backward, clipping and
AdamW, interleaved with the calibration's kernels, and prints estimated over measured time. With
--growth the models differ in width, depth or sequence length.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.calibration import Bench, SmallStep, as_toml, calibrate, compare_steps
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table

CPU_SHAPES = [(m, n, k) for m in (256, 1024) for n, k in ((1024, 256), (256, 1024), (512, 512))]
CPU_SHAPES += [(1024, 64, 512), (1024, 512, 64), (512, 256, 1024), (256, 64, 256), (512, 2048, 512)]
GPU_SHAPES = [(m, n, k) for m in (4096, 16384) for n, k in ((4096, 4096), (1024, 4096))]
GPU_SHAPES += [(16384, n, k) for n, k in ((4096, 1024), (256, 4096), (4096, 256), (1024, 1024))]
GPU_SHAPES += [(4096, 4096, 16384), (1024, 4096, 16384), (16384, 14336, 4096)]
SMALL = [("full", 256, 4), ("full", 512, 2), ("cola", 256, 4), ("cola", 512, 2)]
SMALL += [("svd", 512, 4), ("lax", 256, 2)]
"""Family, width and batch of the steps that are compared."""

GROWTH = [("width", each) for each in (128, 256, 512, 768)]
GROWTH += [("layers", each) for each in (1, 2, 4, 8)]
GROWTH += [("length", each) for each in (64, 128, 256, 512)]
"""What --growth changes, one factor at a time, of cola with width 256, 2 layers, 128 tokens."""


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Write the file; print products and, if asked, steps. Returns the exit status."""
    options = _parse(argv)
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if cuda else "gloo")
        if cuda:
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    bench = Bench(device, dtype, options.repeats, options.megabytes)
    shapes = options.shapes or (GPU_SHAPES if cuda else CPU_SHAPES)
    try:
        machine, rows = calibrate(bench, shapes, options.length)
        first = not dist.is_initialized() or dist.get_rank() == 0
        if first:
            Path(options.out).write_text(as_toml(machine), encoding="utf-8")
            print(text_table(["product", "us", "TFLOP/s", "modelled/measured"], rows))
            print("\n" + "\n".join(f"{k:26}{v}" for k, v in asdict(machine).items()))
        if options.steps:
            small = _cases(options)
            head = ["step", "estimated ms", "measured ms", "ratio", "range"]
            compared = compare_steps(bench, shapes, small, options.steps)
            if first:
                print("\n" + text_table(head, compared))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _cases(options: argparse.Namespace) -> list[SmallStep]:
    if not options.growth:
        return [SmallStep(*case, options.length) for case in SMALL[: options.cases]]
    usual = {"width": 256, "length": 128, "layers": 2}
    grown = [usual | {factor: size} for factor, size in GROWTH[: options.cases]]
    return [SmallStep("cola", g["width"], 4, g["length"], g["layers"]) for g in grown]


def _shape(text: str) -> tuple[int, int, int]:
    m, n, k = (int(part) for part in text.split("x"))
    return m, n, k


def _parse(argv: list[str] | None) -> Any:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE.toml", help="the file to write")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of every kernel")
    parser.add_argument("--megabytes", type=float, default=32, help="size of a large tensor")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--steps", type=int, default=0, help="rounds of measured steps")
    parser.add_argument("--cases", type=int, default=99, help="measured steps per round, at most")
    parser.add_argument("--growth", action="store_true", help="grow one factor at a time instead")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="MxNxK", help="of products")
    options: argparse.Namespace = parser.parse_args(argv)
    if not options.out.endswith(".toml"):
        parser.error(f"--out: got {options.out!r}, expected a name that ends in .toml")
    parser.check_at_least(options, repeats=1, megabytes=0.01, length=16, steps=0, cases=1)
    return options


if __name__ == "__main__":
    sys.exit(main())
