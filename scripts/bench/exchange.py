# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time a gradient's exchange by each codec and dense, in seconds and per MB (TAGC, Table 2).

Every rank has a gradient of ``--megabytes`` and receives the sum of its shard. The time includes
the selection of entries, encoding, the collectives, decoding and the residual, but no model.

    torchrun --nproc_per_node 2 -m scripts.bench.exchange --megabytes 16
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.compat.collectives import reduce_scatter
from torchtitan_lr.compression.codecs import complete
from torchtitan_lr.compression.compressor import Compressor, Span
from torchtitan_lr.compression.sizes import (
    LEVELS,
    CodecSizes,
    bits_per_entry,
    peels,
    smallest_theta,
)
from torchtitan_lr.console.tables import text_table

NAMES = ("dense", "sketch", "sparse")


def main(argv: list[str] | None = None) -> int:
    """Time every codec; rank 0 prints the table or its JSON."""
    options = _parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        report = {name: _bench(name, options, device) for name in options.codecs}
        dense = report.get("dense")
        for row in report.values():
            row["speedup"] = dense["seconds"] / row["seconds"] if dense else float("nan")
        if dist.get_rank() == 0:
            print(json.dumps(report, indent=2) if options.json else _as_text(report))
    finally:
        dist.destroy_process_group()
    return 0


def _bench(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return the seconds per exchange (the slowest rank's median) and the bytes sent."""
    ranks = dist.get_world_size()
    c, theta = LEVELS[options.level]
    if name == "sketch" and ranks > 1 and not peels(c, theta, ranks):
        theta = smallest_theta(c, ranks)
    m = round(options.megabytes * 1e6 / 4 / ranks)
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    gradient = torch.randn(ranks, m, device=device, generator=generator)
    sizes, own = CodecSizes(name, c, theta), torch.empty(m, device=device)
    compressor = Compressor(name, sizes, [Span(m, True)], group, device)

    def call() -> None:
        if name == "dense":
            reduce_scatter(own, gradient.flatten())
        else:
            complete(compressor.exchange_rows(gradient.clone()))

    times = [_seconds(call, device) for _ in range(options.repeats + 2)]
    slowest = torch.tensor(median(times[2:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = float(slowest)
    return {
        "theta": 0.0 if name == "dense" else theta,
        "bits": 32.0 if name == "dense" else bits_per_entry(sizes),
        "seconds": seconds,
        "seconds_per_MB": seconds / (m * ranks * 4 / 1e6),
    }


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _as_text(report: dict[str, dict[str, float]]) -> str:
    lines = []
    for name, row in report.items():
        cells = [name, f"{row['theta']:.3f}", f"{row['bits']:.2f}", f"{1e3 * row['seconds']:.1f}"]
        lines.append([*cells, f"{1e3 * row['seconds_per_MB']:.1f}", f"{row['speedup']:.2f}x"])
    return text_table(["codec", "theta", "bits", "ms/exchange", "ms/MB", "over dense"], lines)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=float, default=16, help="size of each rank's gradient, fp32"
    )
    parser.add_argument("--level", default="10x", choices=list(LEVELS), help="of compression")
    parser.add_argument("--codecs", nargs="+", default=list(NAMES), choices=NAMES, help="to time")
    parser.add_argument("--repeats", type=int, default=7, help="timed exchanges, after two untimed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    if not options.megabytes > 0:
        parser.error(f"--megabytes: got {options.megabytes}, expected a positive number")
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, expected at least 1")
    if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
        parser.error("start it with torchrun, for example: torchrun --nproc_per_node 2 " + __file__)
    return options


if __name__ == "__main__":
    sys.exit(main())
