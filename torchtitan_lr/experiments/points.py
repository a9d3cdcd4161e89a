# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The points of a sweep: runs that are known by their settings, and their results as a table."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.schema import NO_EFFECT
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.run_state import DIVERGED, FINISHED, REFUSED
from torchtitan_lr.models.configured import llama_args

POINT_FILE = "point.json"
"""In a point's folder: its `settings_of`, its arguments, and its row of the table."""

RESULTS = ("val_loss", "val_ppl", "train_loss", "tokens_per_s", "mfu", "peak_memory_gib")

OWN_KEYS = (
    *("job.dump_folder", "job.config_file", "metrics.wandb_run_name", "metrics.wandb_group"),
)
"""Keys that the command sets for each run."""


@dataclass
class Point:
    """One run of a sweep."""

    name: str  # name of its folder and of its wandb run
    config: str  # its TOML file
    arguments: list[str]  # all overrides
    # Settings in which the point differs from others: the first columns of the table
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int | None = None  # number of processes; None for ``NGPU``
    # The point's status and results so far
    row: dict[str, Any] = field(default_factory=lambda: {"status": "to do"})

    @property
    def is_done(self) -> bool:
        """Whether the run has finished or diverged, or cannot run."""
        return self.row["status"] in (FINISHED, DIVERGED, REFUSED)

    @property
    def outcome(self) -> str:
        """How the run ended, and why, as a line."""
        return _outcome(self.row)

    def save(self, work: Path, status: str, why: str = "") -> None:
        """Set the status, and write what is known of the point into its folder."""
        self.row |= {"status": status, "why": why}
        arguments = [self.config, *self.arguments]
        record = {"settings": settings_of(self), "arguments": arguments, "row": self.row}
        path = work / self.name / POINT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record, indent=1) + "\n")


def parse_grid(items: list[str]) -> dict[str, list[str]]:
    """Parse ``KEY=V1,V2`` items."""
    grid: dict[str, list[str]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        values = [_one_spelling(value) for value in text.split(",")]
        if not equals or "." not in key or not all(values):
            raise ConfigError("--set", item, "section.key=value,value")
        if key in grid or len({*values}) < len(values):
            raise ConfigError("--set", item, "each key once, and each value once")
        grid[key] = values
    return grid


def _one_spelling(text: str) -> str:
    """Return the same for texts of one number, such as 1e-3 and 0.001."""
    with suppress(ValueError):
        if isinstance(number := json.loads(text), float):
            return str(number)
    return text


def refuse_keys(items: Iterable[str], own: Sequence[str], where: str = "") -> None:
    """Refuse overrides of keys that a command sets itself."""
    for item in items:
        key = item.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in own:
            raise ConfigError(where + key, item, "nothing: the command sets it for each run")


def points_of(
    config: str, grid: dict[str, list[str]], common: list[str], group: str
) -> list[Point]:
    """Return every point of a grid."""
    last = [key.rpartition(".")[2] for key in grid]
    short = {k: name if last.count(name) == 1 else k for k, name in zip(grid, last, strict=True)}
    points = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        words = [f"{short[key]}-{value}" for key, value in settings.items()]
        name = re.sub(r"[^\w.+-]+", "-", "_".join(words))
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        arguments += [f"--metrics.wandb_group={group}", f"--metrics.wandb_run_name={name}"]
        points.append(Point(name, config, [*common, *arguments], settings))
    if len({point.name for point in points}) < len(points):
        raise ConfigError("--set", group, "values whose names differ in letters or digits")
    return points


def settings_of(point: Point) -> dict[str, Any]:
    """Return what a point's result depends on, as JSON: not its paths, logs or spelling."""
    config = build_job_config([f"--job.config_file={point.config}", *point.arguments])
    sections = config.to_dict()
    found = {name: table for name, table in sections.items() if name not in NO_EFFECT}
    if (args := llama_args(config)) is not None:
        for section in ("low_rank", "caat", "model"):  # they make the arguments
            del found[section]
        found["model"] = {"hf_assets_path": config.model.hf_assets_path} | asdict(args)
    kept: dict[str, Any] = json.loads(json.dumps(found))
    return kept


def read_results(work: Path, points: Iterable[Point]) -> None:
    """Set the rows of the points that were started in a folder; refuse other settings there."""
    for point in points:
        path = work / point.name / POINT_FILE
        if not path.is_file():
            continue
        known, here = _read(path), settings_of(point)
        for section, table in known["settings"].items():
            for key, old in table.items():
                new = here.get(section, {}).get(key, old)
                if new != old:
                    want = f"a folder without a point {point.name} of other settings: "
                    want += f"{section}.{key} is {old!r} there and {new!r} here"
                    raise ConfigError("--out", str(work), want)
        point.row = known["row"]


def losses_of(work: Path) -> dict[str, float]:
    """Return the validation losses of the points with a result; infinite where one diverged."""
    losses = {}
    for path in sorted(work.glob(f"*/{POINT_FILE}")):
        row = _read(path)["row"]
        loss = row.get("val_loss")
        if row["status"] == DIVERGED:
            losses[path.parent.name] = math.inf
        elif row["status"] == FINISHED:
            losses[path.parent.name] = math.inf if loss is None else float(loss)
    return losses


def _read(path: Path) -> dict[str, Any]:
    try:
        known = read_json(path)
        _ = known["settings"].items(), known["row"]["status"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        want = "a file of a sweep; without it the point runs again"
        raise ConfigError("--out", str(path), want) from error
    return known


def table_of(points: Iterable[Point]) -> list[dict[str, Any]]:
    """Return the table: ``status``, ``why``, settings, ``parameters``, ``steps``, `RESULTS`."""
    rows = []
    for point in points:
        told = {"point": point.name, "status": point.row["status"], "why": point.row.get("why", "")}
        results = {key: point.row.get(key) for key in ("parameters", "steps", *RESULTS)}
        rows.append({**told, **point.settings, **results})
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Format a table as Markdown, without the points' names."""
    header = [key for key in rows[0] if key not in ("point", "why")]
    told = [row | {"status": _outcome(row)} for row in rows]
    return markdown_table(header, [[_cell(row[key]) for key in header] for row in told])


def _outcome(row: Mapping[str, Any]) -> str:
    return f"{row['status']}: {row['why']}" if row.get("why") else str(row["status"])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        style = ",.0f" if abs(value) >= 1000 else ".4f" if abs(value) >= 0.1 else ".3g"
        return f"{value:{style}}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
