# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train a few steps under several plans and compare their cost.

    torchtitan-lr compare debug_cola
    NGPU=4 torchtitan-lr compare A.toml B.toml --steps 20 --training.seq_len=256

With one CONFIG, three runs are derived from it: full rank (Megatron's plan), and the low-rank model
under the vanilla plan and under the bottleneck-aware plan. With several CONFIGs, each runs
unchanged. The runs are points of a sweep, one after another on NGPU ranks of this machine (default:
its GPUs, at most 4, or 4 CPU processes without GPUs). Further arguments, --section.key=value, apply
to all runs. Each start measures anew.

The plans of one CONFIG use the same mode of activation checkpointing, which the results name: the
TOML's, or "full" if that is "low_rank" and a full-rank run, which does not support it, is included.

The table has the median seconds per step and their range, tokens per second of all ranks, MFU from
the model's own FLOPs (- if the device's peak is unknown), bytes of all collectives per step
(elements once per call times item size, rank 0), and the largest rank's peak memory. Bytes are
counted in a second run of two steps, as a counted step is slower. The table is printed;
compare.json and compare.png are written to --out.

Exit status: 0 all runs finished, 1 a run failed, 2 invalid arguments or configuration, 130 stopped.
"""

import argparse
import json
from pathlib import Path

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, check_toml
from torchtitan_lr.scaling.variants import ALTERNATIVES


def add_arguments(parser: OneLineParser) -> None:
    """Add the CONFIGs and the options."""
    parser.takes_overrides = True
    parser.add_argument("configs", metavar="CONFIG", nargs="+", help="TOML files or shipped names")
    parser.add_argument("--steps", type=int, default=10, help="steps to time")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    with_one = "with one CONFIG: these, and plans of your own"
    parser.add_argument("--plans", default=",".join(ALTERNATIVES), help=with_one)
    parser.add_argument(
        "--out", type=Path, default="outputs/compare", help="folder of runs and results"
    )
    parser.add_argument("--group", default="", help="wandb group (by default the folder's name)")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")


def run(args: argparse.Namespace) -> int:
    """Check all runs, execute them, and print the table; return the exit status."""
    check_at_least(args, steps=1, warmup=0)
    for config in args.configs:
        check_toml(config)
    from torchtitan_lr.scaling.compare import as_text, draw, points_of, rows_of
    from torchtitan_lr.scaling.sweep import POINT_FILE, Sweep, locked_folder

    points, work = points_of(args), args.out
    with locked_folder(work) as lock:
        for point in points:
            (work / point.name / POINT_FILE).unlink(missing_ok=True)
        sweep = Sweep(work, points)
        sweep.check()
        status = sweep.run(lock)
    rows = rows_of(work, points, args.warmup)
    if rows:
        write_whole(work / "compare.json", json.dumps(rows, indent=1) + "\n")
        draw(rows, work / "compare.png")
        print(json.dumps(rows, indent=1) if args.json else as_text(rows))
    return status
