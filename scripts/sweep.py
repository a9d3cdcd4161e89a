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
import csv
import fcntl
import itertools
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.analysis.parameters import count_parameters
from torchtitan_lr.cli import OneLineParser, markdown_table, overrides_of
from torchtitan_lr.config_checks import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments import RunFailedError, Stopped, check_run, launch, on_signals_stop
from torchtitan_lr.summary import SUMMARY_FILE

POINT_FILE = "point.json"
OWN_KEYS = {
    "job.dump_folder": "each point has a folder of its own in --work",
    "job.config_file": "the TOML file is the first argument",
    "metrics.wandb_run_name": "each point has a name of its own",
    "metrics.wandb_group": "use --group",
}
RESULTS = ("val_loss", "val_ppl", "train_loss", "tokens_per_s", "mfu", "peak_memory_gib")


@dataclass
class Point:
    """One run of the grid.

    Args:
        name: Of its folder and of its wandb run.
        settings: Value by TOML key, as text.
        arguments: All overrides.
        row: What is known of it so far, see `Sweep.rows`.
    """

    name: str
    settings: dict[str, str]
    arguments: list[str]
    row: dict[str, Any] = field(default_factory=dict)


def parse_grid(items: list[str]) -> dict[str, list[str]]:
    """Read ``KEY=V1,V2`` items.

    Raises:
        ConfigError: An item is none, or a key or value stands twice.
    """
    grid: dict[str, list[str]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        values = text.split(",")
        if not equals or "." not in key or not all(values):
            raise ConfigError("--set", item, "section.key=value,value")
        if key in grid:
            raise ConfigError("--set", item, f"each key once, {key} stands twice")
        if len(set(values)) < len(values):
            raise ConfigError("--set", item, "each value once")
        grid[key] = values
    return grid


def check_own_keys(items: list[str]) -> None:
    """Refuse to set what the sweep itself sets for each point.

    Args:
        items: Of ``--set``, and further overrides.

    Raises:
        ConfigError: One of them names such a key.
    """
    for item in items:
        key = item.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in OWN_KEYS:
            raise ConfigError(key, item, f"nothing: {OWN_KEYS[key]}")


def points_of(grid: dict[str, list[str]], common: list[str], group: str) -> list[Point]:
    """Return every combination of a grid.

    Args:
        grid: Values by TOML key.
        common: Overrides of all points.
        group: The wandb group.
    """
    last = [key.rpartition(".")[2] for key in grid]
    short = {k: name if last.count(name) == 1 else k for k, name in zip(grid, last, strict=True)}
    points = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        words = [f"{short[key]}-{value}" for key, value in settings.items()]
        name = re.sub(r"[^\w.+-]+", "-", "_".join(words))
        arguments = overrides_of([f"{key}={value}" for key, value in settings.items()])
        arguments += [f"--metrics.wandb_group={group}", f"--metrics.wandb_run_name={name}"]
        points.append(Point(name, settings, [*common, *arguments]))
    if len({point.name for point in points}) < len(points):
        raise ConfigError("--set", group, "values whose names differ in letters or digits")
    return points


class Sweep:
    """A grid, what is known of its points, and the table.

    Args:
        config: The TOML file.
        work: The folder of all runs.
        points: The grid.
        lock: A file in ``work`` that is locked; each run inherits the lock.
    """

    def __init__(self, config: str, work: Path, points: list[Point], lock: IO[str]) -> None:
        self.config, self.work, self.points, self._lock = config, work, points, lock

    def check(self, skip_refused: bool) -> None:
        """Refuse what cannot work, and find what is finished.

        Raises:
            ConfigError: A point cannot work, or its folder is another sweep's.
        """
        from torchtitan_lr.models.loading import build_model_args  # late: --help needs no torch

        for point in self.points:
            path = self.work / point.name / POINT_FILE
            known = json.loads(path.read_text()) if path.is_file() else {}
            if known and known["arguments"] != [self.config, *point.arguments]:
                want = f"a folder without a point {point.name} of other settings"
                raise ConfigError("--work", str(self.work), want)
            point.row = known.get("row", {})
            try:
                folder = f"--job.dump_folder={self.work / point.name}"
                config = check_run([f"--job.config_file={self.config}", *point.arguments, folder])
            except ConfigError as error:
                if not skip_refused:
                    raise
                point.row = {"status": f"refused: {error}"}
                continue
            point.row.setdefault("status", "to do")
            point.row["parameters"] = count_parameters(build_model_args(config)).total

    def run(self) -> None:
        """Run what is not finished.

        Raises:
            Stopped: A signal asked for the end; the running point has saved.
        """
        self.write()
        for point in self.points:
            if point.row["status"] == "finished" or point.row["status"].startswith("refused"):
                continue
            print(f"{point.name} ...", file=sys.stderr, flush=True)
            folder = self.work / point.name
            self._save(point, "cut off")  # what it is if nothing is written any more
            try:
                descriptors = [self._lock.fileno()]
                launch(self.config, folder, point.arguments, keep_open=descriptors)
                self._finish(point, folder)
            except RunFailedError as error:
                self._save(point, f"failed: {error}")
                print(f"{point.name}: {error}", file=sys.stderr)
            self.write()

    def _finish(self, point: Point, folder: Path) -> None:
        path = folder / SUMMARY_FILE
        summary = json.loads(path.read_text()) if path.is_file() else None
        if summary is None:
            raise RunFailedError("stopped by a signal before its last step")
        point.row |= {"steps": summary["steps"]} | {key: summary[key] for key in RESULTS}
        self._save(point, "finished")

    def _save(self, point: Point, status: str) -> None:
        point.row["status"] = status
        path = self.work / point.name / POINT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        record = {"arguments": [self.config, *point.arguments], "row": point.row}
        scratch.write_text(json.dumps(record, indent=1) + "\n")
        scratch.replace(path)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: ``status``, the settings, ``parameters``, ``steps`` and `RESULTS`."""
        keys = ("parameters", "steps", *RESULTS)
        return [
            {"point": point.name, "status": point.row["status"], **point.settings}
            | {key: point.row.get(key) for key in keys}
            for point in self.points
        ]

    def write(self) -> None:
        """Write the table in three forms."""
        rows = self.rows()
        (self.work / "sweep.json").write_text(json.dumps(rows, indent=1) + "\n")
        with (self.work / "sweep.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (self.work / "sweep.md").write_text(as_markdown(rows) + "\n")


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out as a Markdown table, without the points' names."""
    header = [key for key in rows[0] if key != "point"]
    return markdown_table(header, [[_cell(row[key]) for key in header] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


def main(argv: list[str] | None = None) -> int:
    """Check the grid, run what is missing, sum up."""
    options = _parse(argv)
    work = Path(options.work)
    try:
        work.mkdir(parents=True, exist_ok=True)
        file = (work / ".lock").open("w")
    except OSError as error:
        want = f"a folder to write to ({error.strerror})"
        print(f"error: {ConfigError('--work', options.work, want)}", file=sys.stderr)
        return 2
    with file as lock:
        try:
            check_own_keys([*options.set, *options.overrides])
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
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
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=V1,V2",
        required=True,
        help="a key and its values; may be given again",
    )
    parser.add_argument("--work", default="outputs/sweep", help="folder of runs and results")
    parser.add_argument("--group", default="", help="wandb group (default: the folder's name)")
    parser.add_argument(
        "--skip_refused",
        action="store_true",
        help="leave out combinations that are refused, instead of refusing the sweep",
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options, overrides = parser.parse_known_args(argv)
    parser.check_overrides(overrides)
    options.overrides = overrides
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
