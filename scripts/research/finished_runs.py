# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Keep the finished runs of an experiment in one small file, and go on from it elsewhere.

    python -m scripts.research.finished_runs store recipe outputs/recipe
    python -m scripts.research.finished_runs begin recipe outputs/recipe

scripts/research/results.sh does both around `torchtitan-lr scaling run`.

store reads the runs of a folder that `torchtitan-lr scaling run` has written, and adds those that
are new to scripts/research/experiments/NAME.json, with the commit and the torch that ran them.
begin writes what the sweep needs of them into a folder: they do not run again, and `scaling fit`
reads their losses. It notes there which commit and torch the next runs have.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.experiment import read_experiment
from torchtitan_lr.experiments.plan import Plan
from torchtitan_lr.experiments.sweep import POINT_FILE, Point, settings_of
from torchtitan_lr.launch.run_folder import DIVERGED, FINISHED
from torchtitan_lr.optim.entries import ENTRIES

FOLDER = Path(__file__).parent / "experiments"

VERSIONS_FILE = "versions.json"
"""In the folder of an experiment: the `versions` of the runs since the last `restore`."""

CONFIG, WORK = "CONFIG", "WORK"
"""Stand for the paths of the configuration and of the folder, which differ between machines."""

Run = dict[str, Any]
"""``arguments``; ``row``, the results; `versions`."""


def versions() -> dict[str, str]:
    """Return the checked-out ``commit``, marked if the package differs from it, and ``torch``."""
    commit = _git("rev-parse", "--short=8", "HEAD").strip()
    if _git("status", "--porcelain", "--", ":/torchtitan_lr"):
        commit += " with changes"
    return {"commit": commit, "torch": metadata.version("torch").partition("+")[0]}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError("git", str(error), "a clone of the repository") from error
    return done.stdout


def versions_text(stored: Iterable[Run]) -> str:
    """Return the different `versions` of stored runs as text."""
    pairs = sorted({(run["commit"], run["torch"]) for run in stored})
    return "; ".join(f"commit {commit}, torch {torch}" for commit, torch in pairs)


def stored_runs(name: str) -> dict[str, Run]:
    """Return the stored runs of an experiment by name; empty if there are none."""
    path = FOLDER / f"{name}.json"
    return read_json(path) if path.is_file() else {}


def run_of(folder: Path, work: Path) -> Run | None:
    """Return what is stored of a run of a sweep in ``work``; None if it has not finished."""
    point = read_json(folder / POINT_FILE)
    if point["row"]["status"] not in (FINISHED, DIVERGED):
        return None
    _, *overrides = point["arguments"]
    overrides += own_defaults(point["settings"], overrides)
    arguments = [CONFIG, *(portable(text, work) for text in overrides)]
    return {"arguments": arguments, "row": point["row"]}


def portable(override: str, work: Path) -> str:
    """Return an override whose model, in the sweep's folder under any path, is below WORK."""
    key, _, value = override.partition("=")
    model = Path(value)
    if model.parts[-3:-1] != (work.name, "models"):
        return override
    return f"{key}={WORK}/models/{model.name}"


def own_defaults(settings: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Return what a run had by its optimizer's defaults as overrides: the defaults may change."""
    given = {text.removeprefix("--").partition("=")[0] for text in overrides}
    entry = ENTRIES.get(settings["optimizer.name"])
    keys = set[str]() if entry is None else {*entry.defaults, *chain(*entry.of_models.values())}
    keys -= {"lr_scheduler.warmup_ratio"}  # each run is given its steps
    return [f"--{key}={settings[key]}" for key in sorted(keys - given)]


def store(name: str, work: Path) -> int:
    """Add the finished runs of a folder to the stored ones; return how many it has."""
    started = work / VERSIONS_FILE
    ran_with = read_json(started) if started.is_file() else versions()
    runs, count = stored_runs(name), 0
    for path in sorted(work.glob(f"*/{POINT_FILE}")):
        if (run := run_of(path.parent, work)) is None:
            continue
        count += 1
        stored = runs.get(path.parent.name)
        # A stored run that was restored has its row in the folder, but not its history.
        if stored is None or not {*stored["arguments"]} <= {*run["arguments"]}:
            runs[path.parent.name] = run | ran_with
    lines = [f"{json.dumps(key)}: {json.dumps(runs[key])}" for key in sorted(runs)]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return count


def plan_of(name: str, work: Path) -> Plan:
    """Return the plan of an experiment, whose models are written to the folder of its runs."""
    return Plan(read_experiment(str(FOLDER / f"{name}.toml")), work)


def restore(name: str, plan: Plan) -> int:
    """Write the stored runs into a plan's folder, except those that it has; return their number."""
    work, config = plan.work, find_config(plan.experiment.config)
    work.mkdir(parents=True, exist_ok=True)
    missing = {n: run for n, run in stored_runs(name).items() if not (work / n).exists()}
    for run_name, run in missing.items():
        _, *overrides = run["arguments"]
        arguments = [text.replace(f"={WORK}/", f"={work}/") for text in overrides]
        settings = settings_of(Point(run_name, config, arguments))
        (work / run_name).mkdir(parents=True)
        record = {"settings": settings, "arguments": [config, *arguments], "row": run["row"]}
        (work / run_name / POINT_FILE).write_text(json.dumps(record, indent=1) + "\n")
    return len(missing)


def begin(name: str, work: Path) -> int:
    """Restore the runs of an experiment, and note the versions of those that follow.

    Runs that an interrupted start has left in the folder are stored first, with its versions.
    """
    if (work / VERSIONS_FILE).is_file():
        store(name, work)
    count = restore(name, plan_of(name, work))
    (work / VERSIONS_FILE).write_text(json.dumps(versions()) + "\n")
    return count


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Store runs, or begin with the stored ones, and say how many; return the exit status."""
    parser = OneLineParser(prog="scripts.research.finished_runs", description=__doc__)
    parser.add_argument("command", choices=("store", "begin"), help="what to do")
    parser.add_argument("name", help="of the experiment, such as recipe")
    parser.add_argument("work", type=Path, help="folder of all runs")
    options: argparse.Namespace = parser.parse_args(argv)
    if not (FOLDER / f"{options.name}.toml").is_file():
        raise ConfigError("name", options.name, "an experiment of scripts/research/experiments")
    act = store if options.command == "store" else begin
    print(f"{act(options.name, options.work)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
