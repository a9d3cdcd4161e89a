# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train a grid of settings, one run per point, and collect the results in one table.

    torchtitan-lr sweep debug_cola --set low_rank.rank=16,32 \
        --set parallelism.tp_plan=vanilla,btp --out outputs/ranks --training.steps=100

Each --set names a TOML key and its values; the grid has all combinations. Further arguments,
--section.key=value, apply to all points. A run has NGPU ranks of this machine; --jobs runs several
points at once, on GPUs of their own or on the cores.

The whole grid is checked before the first run. A sweep that is stopped (Ctrl-C saves the active
runs) or killed goes on by the same command: it skips points with a result (finished or diverged),
resumes interrupted ones, and repeats failed ones; `torchtitan-lr runs OUT` shows where they are. In
wandb (--metrics.enable_wandb) all points are one group, named as the folder. sweep.md and
sweep.json in --out have the table after every point; each point has its own folder there.

Exit status: 0 all points have a result, 1 some failed, 2 invalid configuration.
"""

import argparse
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, check_at_least
from torchtitan_lr.config.paths import find_config


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_shared("config")
    grid = "a key and its values; may be repeated"
    parser.add_argument("--set", action="append", metavar="KEY=V1,V2", required=True, help=grid)
    where = "folder of runs and results"
    parser.add_argument("--out", type=Path, default="outputs/sweep", help=where)
    parser.add_argument("--jobs", type=int, default=1, help="points at once")


def run(args: argparse.Namespace) -> int:
    """Check the grid, run the points without a result, print the table; return the exit status."""
    check_at_least(args, jobs=1)
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.experiments import sweep as sweeps
    from torchtitan_lr.launch.run_folder import locked

    sweeps.refuse_keys([*args.set, *args.overrides], sweeps.OWN_KEYS)
    grid, work, config = sweeps.parse_grid(args.set), args.out, find_config(args.config)
    steps = build_job_config([f"--job.config_file={config}", *args.overrides]).training.steps
    saving = ["--checkpoint.enable", f"--checkpoint.interval={max(1, steps // 10)}"]
    common = [*saving, "--checkpoint.keep_latest_k=2", *args.overrides]
    points = sweeps.points_of(config, grid, common, work.name)
    with locked(str(work)):
        sweep = sweeps.Sweep(work, points, args.jobs)
        sweep.check()
        status = sweep.run()
    print(sweeps.as_markdown(sweeps.table_of(points)))
    return status
