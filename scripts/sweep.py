# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train a grid of settings, one run per point, and collect the results in one table.

Each --set names a TOML key and its values; the grid has all combinations. Further arguments,
--section.key=value, apply to all points. The runs execute one after another on NGPU ranks of this
machine (default: its GPUs, at most 4, or 4 CPU processes without GPUs).

    python scripts/sweep.py train_configs/debug_cola.toml --set low_rank.rank=16,32 \
        --set parallelism.tp_plan=vanilla,btp --work outputs/ranks --training.steps=100

The whole grid is checked before the first run. The sweep may be stopped at any time (Ctrl-C saves
the running point) or killed: the same command skips finished points and resumes the interrupted one
from its last checkpoint. Failed points run again. In wandb (--metrics.enable_wandb) all points are
one group. The table is written to sweep.md, sweep.csv and sweep.json in --work after every point;
each point has its own folder there.

Exit status: 0 all points finished, 1 some failed, 2 invalid configuration, 130 stopped.
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import lock_file
from torchtitan_lr.scaling.experiments import Stopped, on_signals_stop
from torchtitan_lr.scaling.sweep import Sweep, as_markdown, check_own_keys, parse_grid, points_of


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Check the grid, run the unfinished points, print the table; return the exit status."""
    options = _parse(argv)
    work = Path(options.work)
    try:
        work.mkdir(parents=True, exist_ok=True)
        file = (work / ".lock").open("w")
    except OSError as error:
        want = f"a folder to write to ({error.strerror})"
        raise ConfigError("--work", options.work, want) from error
    with file as lock:
        check_own_keys([*options.set, *options.overrides])
        try:
            lock_file(lock, work / ".lock")
        except BlockingIOError:
            want = "a folder that no other sweep, nor a run left by one, is using"
            raise ConfigError("--work", options.work, want) from None
        base = build_job_config([f"--job.config_file={options.config}", *options.overrides])
        interval = max(1, base.training.steps // 10)
        saving = ["--checkpoint.enable", f"--checkpoint.interval={interval}"]
        common = [*saving, "--checkpoint.keep_latest_k=2", *options.overrides]
        grid = points_of(parse_grid(options.set), common, options.group or work.name)
        sweep = Sweep(options.config, work, grid, lock)
        sweep.check(options.skip_refused)
        on_signals_stop()
        try:
            sweep.run()
        except Stopped as signal:
            print(f"stopped by {signal}: run the same command to continue", file=sys.stderr)
            return 130
    rows = sweep.rows()
    print(json.dumps(rows, indent=1) if options.json else as_markdown(rows))
    return 1 if any(row["status"].startswith("failed") for row in rows) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=V1,V2",
        required=True,
        help="a key and its values; may be repeated",
    )
    parser.add_argument(
        *("--out", "--work"),
        dest="work",
        default="outputs/sweep",
        help="folder of runs and results",
    )
    parser.add_argument("--group", default="", help="wandb group (by default the folder's name)")
    parser.add_argument(
        "--skip_refused",
        action="store_true",
        help="leave out invalid combinations, instead of stopping with an error",
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options = parser.parse_with_overrides(argv)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
