# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Trains a grid of settings, one run a point, and sums them up in one table.

Each --set names a TOML key and its values; the grid is every combination. Further arguments,
--section.key=value, go to all points. Runs follow one another on NGPU ranks of this machine
(default 4: GPUs, or processes where there are too few).

    python scripts/sweep.py train_configs/debug_cola.toml --set low_rank.rank=16,32 \
        --set parallelism.tp_plan=vanilla,btp --work outputs/ranks --training.steps=100

The whole grid is checked before the first run. The sweep may be stopped at any time (Ctrl-C saves
the running point) or killed: the same command skips the points that are finished and continues the
one that was cut off from its last checkpoint. A point that failed is tried again. In wandb
(--metrics.enable_wandb) all points are one group. The table is sweep.md, sweep.csv and sweep.json
in --work, written after every point; each point's run is in a folder of its own there.

Exit status: 0 all points are finished, 1 some failed, 2 something is refused, 130 stopped.
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import lock_file
from torchtitan_lr.tools.cli import OneLineParser, in_one_line
from torchtitan_lr.tools.experiments import Stopped, on_signals_stop
from torchtitan_lr.tools.sweep import Sweep, as_markdown, check_own_keys, parse_grid, points_of


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Check the grid, run what is missing, sum up."""
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
            want = "a folder in which no sweep, nor a run that one left behind, is at work"
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
            print(f"stopped by {signal}: the same command goes on", file=sys.stderr)
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
        help="a key and its values; may be given again",
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
        help="leave out combinations that are refused, instead of refusing the sweep",
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options = parser.parse_with_overrides(argv)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
