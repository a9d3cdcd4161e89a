# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plan, run and fit an experiment: families of models over sizes, budgets and seeds.

    torchtitan-lr scaling plan scaling_cpu
    torchtitan-lr scaling run scaling_cpu --out outputs/scaling_cpu --jobs 2
    torchtitan-lr scaling fit scaling_cpu --out outputs/scaling_cpu

EXPERIMENT is a TOML file, or the name of a shipped one in train_configs/experiments. Further
arguments, --section.key=value, apply to all runs, and are given to each of the commands.

plan prints families, sizes and budgets with their parameters, tokens and FLOPs, and starts no run.
run executes what is missing, the cheapest first, as a sweep does: it may be stopped and goes on.
Learning rates are searched first: all at the first size, then those beside the best; a grid whose
best is at its end goes on. A failed run holds up only the runs that need it. In wandb
(--metrics.enable_wandb) all runs are one group.
fit prints the losses, fits L = E + A C^(-alpha) to four points or more by the Huber loss of log L,
with bootstrap intervals, and writes scaling.md, scaling.json and scaling.png to --out.

Exit status: 0; 1 a run failed or a search found no best rate; 2 an invalid experiment.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lr.commands.parser import OneLineParser, check_at_least
from torchtitan_lr.errors import ConfigError, escaped

if TYPE_CHECKING:
    from torchtitan_lr.experiments.plan import Plan


def add_arguments(parser: OneLineParser) -> None:
    """Add the command, EXPERIMENT and the options."""
    parser.takes_overrides = True
    parser.add_argument("command", choices=("plan", "run", "fit"), help="what to do")
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a TOML file or a shipped name")
    parser.add_argument("--out", type=Path, help="folder of all runs (default: outputs/NAME)")
    parser.add_argument("--jobs", type=int, default=1, help="run: runs at once")


def run(args: argparse.Namespace) -> int:
    """Execute a command; return the exit status."""
    check_at_least(args, jobs=1)
    from torchtitan_lr.experiments.experiment import read_experiment

    experiment = read_experiment(args.experiment, args.overrides)
    work = args.out or Path(f"outputs/{experiment.name}")
    # Late: a wrong experiment is reported without torch.
    from torchtitan_lr.experiments.plan import Plan
    from torchtitan_lr.launch.run_folder import locked

    if args.command != "run":
        return show(Plan(experiment, work), args.command == "fit")
    with locked(str(work)):
        return execute(Plan(experiment, work), args.jobs)


def execute(plan: "Plan", jobs: int) -> int:
    """Run what is missing, several runs at once; return the exit status."""
    from torchtitan_lr.experiments.sweep import Sweep, losses_of

    failed: set[str] = set()  # the next command repeats them
    while True:  # a finished search determines further runs
        searched = plan.searched(losses_of(plan.work))
        sweep = Sweep(plan.work, plan.points(searched), jobs)
        if all(point.is_done or point.name in failed for point in sweep.points):
            break
        sweep.check()
        sweep.run(without=failed)
        failed = {point.name for point in sweep.points if not point.is_done}
    for line in searched.edges:
        print(escaped(line), file=sys.stderr)
    return int(bool(failed or searched.edges))


def show(plan: "Plan", fit: bool) -> int:
    """Print the table, with the fitted laws or with what is left to do; return the exit status."""
    from torchtitan_lr.console.terminal import text_table
    from torchtitan_lr.experiments.results import fits_of, rows_of, table, write
    from torchtitan_lr.experiments.sweep import losses_of, read_results

    searched = plan.searched(losses_of(plan.work))
    points, main = plan.points(searched), plan.main_points(searched.rates)
    read_results(plan.work, [*points, *main])
    rows = rows_of(main, plan.experiment.reference)
    if fit:
        if not any(row["losses"] for row in rows):
            want = "a folder with finished runs of the experiment"
            raise ConfigError("--out", str(plan.work), want)
        print(write(plan, searched.edges, rows, fits_of(rows)))
        return int(bool(searched.edges))
    print(text_table(*table(rows, plan.experiment.reference), left=2))
    every = {point.name: point for point in [*points, *main]}.values()
    left = [point for point in every if not point.is_done]
    flops = sum(point.settings["FLOPs"] for point in left)
    print(f"{len(every)} runs, {len(left)} to do, {flops:.3g} FLOPs")
    if unknown := [" ".join(pair) for pair, rate in searched.rates.items() if rate is None]:
        print(f"learning rates still to search: {', '.join(unknown)}")
    return 0
