# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Plan, run and fit a scaling experiment: families of models over sizes, budgets and seeds.

    python scripts/scaling.py plan scaling_cpu
    python scripts/scaling.py run scaling_cpu --out outputs/scaling_cpu --jobs 2
    python scripts/scaling.py fit scaling_cpu --out outputs/scaling_cpu
    python scripts/scaling.py page families --out outputs/families

EXPERIMENT is a TOML file, or the name of a shipped one in train_configs/experiments.

plan lists the runs with their parameters, FLOPs, bytes sent and expected time, and starts none. run
executes what is missing, several runs at once where the machine allows. It may be stopped at any
time (Ctrl-C saves the active runs): the same command goes on. Learning rates are searched first. A
best value at the edge of its grid makes the grid grow; where it may not, the runs that need it do
not start. Runs of another commit than those in the folder are refused without --mix_commits.

fit fits L = E + A C^(-alpha), the same over parameters, bytes and modelled seconds, and where the
grid allows L(N, D) = E + A N^(-alpha) + B D^(-beta), by the Huber loss of log L, with bootstrap
intervals over points and seeds. It prints a table and writes scaling.md, scaling.json and
scaling.png to the folder.

page writes tables and the picture between the lines <!-- scaling NAME: table --> and <!-- end -->
of a page, docs/results/NAME.md by default. Other parts than table: gaps, halves, laws, parameters,
picture, ranks, searches, shapes and source.

Exit status: 0; 1 a run failed or a learning rate is an edge of its grid; 2 an invalid experiment;
130 stopped.
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Execute a command; returns the exit status."""
    options = _parse(argv)
    from torchtitan_lr.scaling.experiment import read_experiment

    experiment = read_experiment(options.experiment)
    # Late: a wrong experiment is reported without torch.
    from torchtitan_lr.scaling import commands
    from torchtitan_lr.scaling.plan import Plan

    work = Path(options.work or f"outputs/{experiment.name}")
    commands.open_folder(work)
    plan = Plan(experiment, work, [size for size in options.sizes.split(",") if size])
    if options.command == "plan":
        return commands.show(plan, options.jobs, options.json)
    if options.command == "run":
        return commands.execute(plan, options.jobs, options.mix_commits)
    if options.command == "page":
        rest = (options.draws, options.huber, options.all_points)
        return commands.write_page(plan, options.page, *rest)
    return commands.fit(plan, options.draws, options.huber, options.all_points, options.json)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("command", choices=("plan", "run", "fit", "page"), help="what to do")
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a TOML file or a shipped name")
    parser.add_argument(
        *("--out", "--work"),
        dest="work",
        default="",
        help="folder of runs and results (default: outputs/NAME)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="runs at once (default: as many as the machine has cores or GPUs for)",
    )
    parser.add_argument("--sizes", default="", help="run: only these sizes, with commas")
    parser.add_argument(
        "--mix_commits", action="store_true", help="run: add runs of another commit to the folder"
    )
    parser.add_argument("--draws", type=int, default=1000, help="fit: bootstrap fits")
    parser.add_argument(
        "--huber",
        type=float,
        default=0.01,
        help="fit: difference of log L from which a point counts linearly",
    )
    parser.add_argument(
        "--all_points",
        action="store_true",
        help="fit: all points along one variable, and not only those that no cheaper one beats",
    )
    parser.add_argument("--page", default="", help="page: the file (default: docs/results/NAME.md)")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    options = parser.parse_args(argv)
    parser.check_at_least(options, jobs=0, draws=10, huber=1e-9)
    return options


if __name__ == "__main__":
    sys.exit(main())
