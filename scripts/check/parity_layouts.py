#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train the same job in every parallel layout and print the differences.

Every family starts from its own seed checkpoint, trains 10 steps in fp32 on gloo ranks started by
the script, and is compared with one process: losses, gradient norms and the final parameters; an
error is the largest max|a - b| / max|b|. The exit status is 1 if one exceeds 1e-5.

    python scripts/check/parity_layouts.py                     # 4 families, 13 layouts
    python scripts/check/parity_layouts.py --only lax --only pp4
    python scripts/check/parity_layouts.py --matrix --ranks 8  # every pair of values of the matrix
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.parity_runs import (
    DEEP,
    EXACT,
    LAYOUTS,
    ROUNDING,
    TINY,
    bf16_references,
    largest_difference,
    model,
    rounding_excess,
    schedule,
    train,
    write_seed_checkpoint,
)
from tests.support.rank_pool import RankPool
from tests.support.support_matrix import SupportMatrix, world_size
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.models.families.registry import FAMILIES

SCHEDULES = {
    f"{layout}_{name}": (LAYOUTS[layout][0], [*LAYOUTS[layout][1], *schedule(name)])
    for layout in ("fsdp2_pp2", "pp2_tp2")
    for name in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
}


class Pools:
    """Pools of ranks by size, started on first use."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def of(self, ranks: int) -> RankPool:
        """Return the pool with a number of ranks."""
        return self._pools.setdefault(ranks, RankPool(ranks))

    def train(self, ranks: int, arguments: list[str]) -> dict[str, Any]:
        """Train on a number of ranks; return rank 0's result."""
        result: dict[str, Any] = self.of(ranks).run(train, arguments, timeout=900)[0]
        return result

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()


def seed_checkpoint(pools: Pools, family: str, folder: Path) -> str:
    """Write a family's initial weights and return the checkpoint's folder."""
    options = [*TINY, *model(family), *DEEP, *LAYOUTS["dp1"][1]]
    options += ["--debug.seed=7", f"--job.dump_folder={folder / family}"]
    path: str = pools.of(1).run(write_seed_checkpoint, options)[0]
    return path


def layouts(pools: Pools, only: list[str], folder: Path) -> dict[str, float]:
    """Return the error of every family and layout."""
    errors = {}
    for family in FAMILIES:
        names = {f"{family} {layout}": value for layout, value in (LAYOUTS | SCHEDULES).items()}
        names = {n: v for n, v in names.items() if all(part in n.split() for part in only)}
        names.pop(f"{family} dp1", None)
        if not names:
            continue
        start = [*DEEP, "--checkpoint.enable", "--training.steps=10"]
        start.append(f"--checkpoint.initial_load_path={seed_checkpoint(pools, family, folder)}")
        expected = pools.train(1, [*model(family), *LAYOUTS["dp1"][1], *start])
        for name, (ranks, options) in names.items():
            run = pools.train(ranks, [*model(family), *options, *start])
            errors[name] = largest_difference(run, expected)
            report(name, errors[name], EXACT)
    return errors


def matrix(pools: Pools, ranks: int) -> dict[str, float]:
    """Return the error of combinations that cover every pair of the support matrix.

    A bf16 run is compared with the rounding error of one process, and the result is scaled.
    """
    errors, support = {}, SupportMatrix()
    references: dict[tuple[str, ...], Any] = {}
    for combination in support.draws(0, 200, ranks):
        name = "-".join(value for value in combination.values() if value != "none")
        exact = combination["precision"] == "none"
        alone = (*support.reference(combination | {"precision": "none"}), "--training.steps=2")
        key = (*alone, str(exact))
        if key not in references:
            references[key] = (
                pools.train(1, list(alone)) if exact else bf16_references(pools.of(1), list(alone))
            )
        arguments = [*support.arguments(combination), "--training.steps=2"]
        run = pools.train(world_size(combination), arguments)
        errors[name] = (
            largest_difference(run, references[key])
            if exact
            else rounding_excess(run, references[key]) * EXACT / ROUNDING
        )
        report(name, errors[name], EXACT)
    return errors


def report(name: str, error: float, tolerance: float) -> None:
    """Print one result."""
    print(f"{error:.1e}  {name}{'' if error < tolerance else '  OUT OF EXACT'}", flush=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a family or a layout")
    parser.add_argument("--matrix", action="store_true", help="the support matrix instead")
    parser.add_argument("--ranks", type=int, default=8, help="maximum number of ranks for --matrix")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return the exit status."""
    arguments = parse_args(argv)
    pools, start = Pools(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.matrix:
                errors = matrix(pools, arguments.ranks)
            else:
                errors = layouts(pools, arguments.only, Path(folder))
    finally:
        pools.close()
    if not errors:
        print(f"error: nothing is called {' '.join(arguments.only)}", file=sys.stderr)
        return 2
    failures = sum(not error < EXACT for error in errors.values())
    worst = max(errors, key=lambda name: errors[name])
    print(
        f"{len(errors)} runs, {failures} failed, worst {errors[worst]:.1e} ({worst}), "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
