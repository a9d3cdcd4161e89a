# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Plan, run and fit a scaling experiment: families of models over sizes, budgets and seeds.

    python scripts/scaling.py plan scaling_cpu
    python scripts/scaling.py run scaling_cpu --out outputs/scaling_cpu --jobs 2
    python scripts/scaling.py fit scaling_cpu --out outputs/scaling_cpu

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

Exit status: 0; 1 a run failed or a learning rate is an edge of its grid; 2 an invalid experiment;
130 stopped.
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.cli import OneLineParser, in_one_line

COMMANDS = ("plan", "run", "fit")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Execute a command; returns the exit status."""
    options = _parse(argv)
    from torchtitan_lr.tools.scaling.experiment import read_experiment  # late: --help is fast
    from torchtitan_lr.tools.scaling.plan import Plan

    experiment = read_experiment(options.experiment)
    work = Path(options.work or f"outputs/{experiment.name}")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        want = f"a folder to write to ({error.strerror})"
        raise ConfigError("--out", str(work), want) from error
    plan = Plan(experiment, work)
    if options.command == "plan":
        return _show(plan, options)
    if options.command == "run":
        return _run(plan, options)
    return _fit(plan, options)


def _slots(plan, options: argparse.Namespace) -> tuple[list[str], str]:  # type: ignore[no-untyped-def]
    """Return the devices of each run that may execute at once, and the type of device."""
    from torchtitan_lr.launch.environment import read_environment
    from torchtitan_lr.launch.placement import find_device
    from torchtitan_lr.tools.scaling.runner import slots_of
