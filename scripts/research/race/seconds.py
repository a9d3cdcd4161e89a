# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Measure the seconds per step of every method of the race, with and without a slow link.

    python -m scripts.research.race.seconds outputs/race

Two ranks, each in a network namespace of its own, train a few steps with every family of
scripts/research/experiments/race.toml: first on a link without a limit, for the computation, then
at --mbit. Of 80 steps the last 64 count, in which every method of DiLoCo syncs. This needs root
and iproute2, and nothing else may run meanwhile. `torchtitan-lr scaling report` reads the file that
is written, seconds.json, and `scripts/research/results.sh race` stores it and writes its tables.
Families that it has are not measured again. The runs stay in the folder
seconds/LINK/FAMILY beside it. With --metrics.enable_wandb --metrics.wandb_mode=offline their wandb
files do too: the runs of a link are one group, and a method is a tag.

Exit status: 0; 1 a run failed; 2 invalid arguments, or namespaces are not permitted.
"""

import json
import signal
import sys
from pathlib import Path
from statistics import fmean

from scripts.research.slow_link import NotPermittedError, slow_link, train_between
from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.links import SECONDS_FILE
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.training.history import STEP_SECONDS

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "race.toml"

NO_LIMIT = 100_000.0
"""Mbit/s, more than a pair of virtual devices carries."""

TIMEOUT = 1800
"""Seconds for a run."""

QUIET = [
    *("--metrics.no_comm_ledger", "--validation.no_enable", "--checkpoint.no_enable"),
    "--lr_scheduler.warmup_steps=1",
]


def measure(plan: Plan, path: Path, steps: int, mbit: float, overrides: list[str]) -> None:
    """Add what is missing to the file of seconds, family after family."""
    found = read_json(path) if path.is_file() else {}
    for name, rate in {"compute": NO_LIMIT, f"{mbit:g}": mbit}.items():
        seconds = found.setdefault(name, {})
        with slow_link(rate) as ends:
            for family, size in plan.costs:
                if family in seconds:
                    continue
                point = plan.point(family, size, 1.0, 0, 1e-3)
                run = [f"--job.config_file={point.config}", *point.arguments, *QUIET]
                run.append(f"--training.steps={steps}")
                run.append(f"--metrics.wandb_group={plan.experiment.name} {name}")
                run.append(f"--metrics.wandb_run_name={family} {name}")
                run += [f"--metrics.wandb_tags={family},{size}", *overrides]
                folder = path.parent / "seconds" / name / family
                records = train_between(ends, run, TIMEOUT, folder)
                seconds[family] = fmean(record[STEP_SECONDS] for record in records)
                write_whole(path, json.dumps(found, indent=1) + "\n")
                print(f"{family}, {name}: {seconds[family]:.3f} s per step", flush=True)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure what is missing; return the exit status."""
    parser = OneLineParser(prog="scripts.research.race.seconds", description=__doc__)
    parser.takes_overrides = True
    parser.add_argument("work", type=Path, help="folder of the race's runs")
    parser.add_argument("--steps", type=int, default=80, help="the last 4/5 count")
    parser.add_argument("--mbit", type=float, default=200, help="rate of the link, Mbit/s")
    options = parser.parse_args(argv)
    check_at_least(options, steps=5, mbit=0.1)
    # Exit through the `finally` of the namespaces, which outlive their process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = Plan(read_experiment(str(EXPERIMENT)), options.work)
    try:
        path = options.work / SECONDS_FILE
        measure(plan, path, options.steps, options.mbit, options.overrides)
    except NotPermittedError as error:
        raise ConfigError("--mbit", options.mbit, f"network namespaces ({error})") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
