#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compare every tensor-parallel case with one process and print the errors.

The script starts four gloo ranks. An error is the largest max|a - b| / max|b| over the loss, the
logits, the gradient at the embedding's output and every gathered parameter gradient. A row of the
table is a plan, a family and a kind of attention; its columns are the worst errors over all other
settings (grouping, norm, statistic, communication, head). The exit status is 1 if a case is out of
tolerance: 1e-12 in fp64, 1e-5 in fp32.

    python scripts/check/parity_matrix.py                  # all of it: several minutes on two cores
    python scripts/check/parity_matrix.py --only btp-lax --cases
"""

import os
import sys
import time
from collections import defaultdict

# Four ranks with one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.support import parity_cases
from tests.support.parity_cases import TOLERANCE, Case, all_cases
from tests.support.rank_pool import RankPool
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.console.tables import text_table


def run_case(case: Case, backend: str) -> dict[str, float]:
    """Return the errors of a case on the calling rank, compiled if a backend is named."""
    parity_cases.BACKEND = backend
    return parity_cases.parity(case, *([parity_cases.compile_blocks] if backend else []))


def format_table(errors: dict[Case, float]) -> str:
    """Format the worst error by plan, family, attention, degree and dtype."""
    columns = [(degree, dtype) for dtype in TOLERANCE for degree in (2, 4)]
    rows: dict[tuple[str, str, str], dict[tuple[int, torch.dtype], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for case, error in errors.items():
        family = case.family + (" (gated)" if case.gate == "scalar" else "")
        row = rows[case.settings.plan, family, "GQA" if case.gqa else "MHA"]
        row[case.degree, case.dtype].append(error)
    names = [f"T={degree} {str(dtype).removeprefix('torch.')}" for degree, dtype in columns]
    lines = []
    for (plan, family, attention), cells in rows.items():
        count = sum(len(cell) for cell in cells.values())
        worst = [f"{max(cells[c]):.1e}" if c in cells else "" for c in columns]
        lines.append([plan, family, attention, str(count), *worst])
    return text_table(["plan", "family", "attn", "cases", *names], lines, left=3)


def main(argv: list[str] | None = None) -> int:
    """Run the script; return the exit status."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--cases", action="store_true", help="also print every case")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="compile the blocks")
    arguments = parser.parse_args(argv)
    cases = [case for case in all_cases() if arguments.only in str(case)]
    if not cases:
        parser.error(f"no case has {arguments.only!r} in its name")
    errors: dict[Case, float] = {}
    pool, start = RankPool(4), time.monotonic()
    try:
        for case in cases:
            by_rank = pool.run(run_case, case, arguments.compile)
            errors[case] = max(max(of_rank.values()) for of_rank in by_rank)
            failed = not errors[case] <= TOLERANCE[case.dtype]
            if arguments.cases or failed:
                print(
                    f"{errors[case]:.1e}  {case}{'  OUT OF TOLERANCE' if failed else ''}",
                    flush=True,
                )
    finally:
        pool.close()
    print(format_table(errors))
    failures = sum(not error <= TOLERANCE[case.dtype] for case, error in errors.items())
    print(f"{len(cases)} cases, {failures} failed, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
