#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure how a step grows with width, layers, length and ranks, beside the estimator's line.

    python scripts/check/growth.py --out growth.json                  # all factors
    python scripts/check/growth.py --out growth.json --factors ranks  # adds one, keeps the others
    python scripts/check/growth.py --out growth.json --factors        # none: draws what FILE holds

Steps of small CoLA models under BTP on gloo ranks, forward, backward and AdamW, in fp32 with one
thread per rank. Points of one factor take turns. Time is the CPU time of a rank, which other
processes and waiting disturb less than the clock; the estimate beside it has constants measured in
the same minute, collectives included. Memory is that of weights, gradients, moments and of
what forward keeps for backward. Bytes are those of the ledger. The picture is written beside --out,
or to --picture.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.bench.calibration import Bench
from scripts.bench.growth import (
    Links,
    Point,
    draw,
    estimate_point,
    measure,
    measure_links,
    measure_machine,
    table,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.step_time import Hardware

SHAPES = [(512, n, k) for n, k in ((256, 64), (64, 256), (512, 128), (128, 512), (2048, 256))]
SHAPES += [(256, 128, 32), (256, 32, 128), (512, 1024, 128), (1024, 256, 256)]
"""Products that are timed for the estimate: those of BTP are thin."""

SIZES = {
    "width": (256, 512, 768, 1024),
    "layers": (1, 2, 4, 8),
    "length": (64, 128, 256, 512),
    "ranks": (1, 2, 4, 8),
}
HEAD = ["point", "CPU ms", "estimated", "ratio", "MiB", "estimated", "ratio"]
HEAD += ["MB sent", "estimated", "ratio"]


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure the factors, write JSON and picture, and print the table."""
    options = _parse(argv)
    out = Path(options.out)
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if not (options.factors or report):
        raise ConfigError("--factors", "none", "at least one factor, or --out with some measured")
    picture = Path(options.picture) if options.picture else out.with_suffix(".png")
    torch.set_num_threads(1)
    bench = Bench(torch.device("cpu"), torch.float32, options.repeats, options.megabytes)
    for factor in options.factors:
        points = [Point(factor, **{factor: size}) for size in SIZES[factor][: options.points]]
        report[factor] = _measured(points, bench, options.rounds)
        report = {name: report[name] for name in SIZES if name in report}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, picture)
    lines: list[list[str]] = []
    table(report, lines.append)
    print(text_table(HEAD, lines))
    return 0


def _measured(points: list[Point], bench: Bench, rounds: int) -> list[dict[str, Any]]:
    pools = {ranks: RankPool(ranks) for ranks in sorted({point.ranks for point in points})}
    try:
        length = points[0].length
        machines = {n: measure_machine(pool, bench, SHAPES, length) for n, pool in pools.items()}
        links = {n: _links(pool, n, machines[n], bench.repeats) for n, pool in pools.items()}
        found = measure(pools, points, rounds)
    finally:
        for pool in pools.values():
            pool.close()
    expected = [estimate_point(p, machines[p.ranks], links[p.ranks]) for p in points]
    return [
        {"size": point.size, "measured": m, "estimated": e}
        for point, m, e in zip(points, found, expected, strict=True)
    ]


def _links(pool: RankPool, ranks: int, machine: Hardware, repeats: int) -> Links:
    return measure_links(pool, ranks, machine, repeats) if ranks > 1 else Links()


def _parse(argv: list[str] | None) -> Any:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE.json", help="the file to write")
    parser.add_argument("--picture", default="", metavar="FILE.png", help="default: beside --out")
    parser.add_argument("--factors", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each point")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of every kernel")
    parser.add_argument("--megabytes", type=float, default=32, help="size of a large tensor")
    parser.add_argument("--points", type=int, default=4, help="points of a factor, at most")
    options: argparse.Namespace = parser.parse_args(argv)
    if not options.out.endswith(".json"):
        parser.error(f"--out: got {options.out!r}, expected a name that ends in .json")
    if options.picture and not options.picture.endswith(".png"):
        parser.error(f"--picture: got {options.picture!r}, expected a name that ends in .png")
    parser.check_at_least(options, rounds=1, repeats=1, megabytes=0.01, points=1)
    return options


if __name__ == "__main__":
    sys.exit(main())
