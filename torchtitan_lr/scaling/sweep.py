# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A grid of settings: its points, their results, and the table of all runs."""

import csv
import itertools
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.formulas.parameters import count_parameters
from torchtitan_lr.scaling.experiments import check_run, launch
from torchtitan_lr.training.summary import SUMMARY_FILE

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
        name: Name of its folder and of its wandb run.
        settings: Value by TOML key, as text.
        arguments: All overrides.
        row: Its results so far, see `Sweep.rows`.
    """

    name: str
    settings: dict[str, str]
    arguments: list[str]
    row: dict[str, Any] = field(default_factory=dict)


def parse_grid(items: list[str]) -> dict[str, list[str]]:
    """Parse ``KEY=V1,V2`` items.

    Raises:
        ConfigError: An item is malformed, or a key or value occurs twice.
    """
    grid: dict[str, list[str]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        values = text.split(",")
        if not equals or "." not in key or not all(values):
            raise ConfigError("--set", item, "section.key=value,value")
        if key in grid:
            raise ConfigError("--set", item, f"each key once, {key} occurs twice")
        if len(set(values)) < len(values):
            raise ConfigError("--set", item, "each value once")
        grid[key] = values
    return grid


def check_own_keys(items: list[str]) -> None:
    """Raise for keys that the sweep itself sets for each point.

    Args:
        items: Items of ``--set``, and further overrides.

    Raises:
        ConfigError: An item sets such a key.
    """
    for item in items:
        key = item.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in OWN_KEYS:
            raise ConfigError(key, item, f"nothing: {OWN_KEYS[key]}")


def points_of(grid: dict[str, list[str]], common: list[str], group: str) -> list[Point]:
    """Return every point of a grid.

    Args:
        grid: Values by TOML key.
        common: Overrides for all points.
        group: The wandb group.
    """
    last = [key.rpartition(".")[2] for key in grid]
    short = {k: name if last.count(name) == 1 else k for k, name in zip(grid, last, strict=True)}
    points = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        words = [f"{short[key]}-{value}" for key, value in settings.items()]
        name = re.sub(r"[^\w.+-]+", "-", "_".join(words))
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        arguments += [f"--metrics.wandb_group={group}", f"--metrics.wandb_run_name={name}"]
        points.append(Point(name, settings, [*common, *arguments]))
    if len({point.name for point in points}) < len(points):
        raise ConfigError("--set", group, "values whose names differ in letters or digits")
    return points


class Sweep:
    """A grid, the results of its points, and the table.

    Args:
        config: The TOML file.
        work: The folder of all runs.
        points: The points of the grid.
        lock: A locked file in ``work``; each run inherits the lock.
    """

    def __init__(self, config: str, work: Path, points: list[Point], lock: IO[str]) -> None:
        self.config, self.work, self.points, self._lock = config, work, points, lock

    def check(self, skip_refused: bool) -> None:
        """Check every point, and find the finished ones.

        Raises:
            ConfigError: A point's configuration is not valid, or its folder belongs to another
                sweep.
        """
        from torchtitan_lr.hf.loading import build_model_args  # late, for a fast --help

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
        """Run the unfinished points.

        Raises:
            Stopped: The process received a stop signal; the running point has saved.
        """
        self.write()
        for point in self.points:
            if point.row["status"] == "finished" or point.row["status"].startswith("refused"):
                continue
            print(f"{point.name} ...", file=sys.stderr, flush=True)
            folder = self.work / point.name
            self._save(point, "cut off")  # the status if this process dies here
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
        """Write the table in three formats."""
        rows = self.rows()
        (self.work / "sweep.json").write_text(json.dumps(rows, indent=1) + "\n")
        with (self.work / "sweep.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (self.work / "sweep.md").write_text(as_markdown(rows) + "\n")


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table, without the points' names."""
    header = [key for key in rows[0] if key != "point"]
    return markdown_table(header, [[_cell(row[key]) for key in header] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
