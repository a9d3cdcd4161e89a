# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A sweep: training runs that are checked together, run once each, and end in one table."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.checkpoints.run_record import by_key
from torchtitan_lr.compat.devices import gpu_count
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.schema import NO_EFFECT
from torchtitan_lr.console.log import say
from torchtitan_lr.console.terminal import markdown_table
from torchtitan_lr.errors import ConfigError, escaped, require
from torchtitan_lr.experiments.start import place_run
from torchtitan_lr.launch import run_folder
from torchtitan_lr.launch.run_folder import DIVERGED, EXIT_STATUS, FAILED, FINISHED, STOPPED
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.optim.entries import unread_keys
from torchtitan_lr.training.history import SUMMARY_FILE

POINT_FILE = "point.json"
"""In a point's folder: its `settings_of`, its arguments, and its row of the table."""

RESULTS = ("val_loss", "val_ppl", "train_loss", "tokens_per_s", "mfu", "peak_memory_gib")

OWN_KEYS = ("job.dump_folder", "job.config_file", "metrics.wandb_run_name", "metrics.wandb_group")
"""Keys that a sweep sets for each run."""

_ERRORS_FILE = "stderr.log"
"""In a point's folder: what its launcher has written to stderr."""

_POLL_SECONDS = 0.1


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
    row: dict[str, Any] = field(default_factory=lambda: {"status": "to do", "why": ""})

    @property
    def is_done(self) -> bool:
        """Whether the run has finished or diverged."""
        return self.row["status"] in (FINISHED, DIVERGED)

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
        fits = equals and "." in key and all(values)
        once = key not in grid and len({*values}) == len(values)
        want = "section.key=value,value, each key once, and each value once"
        require(fits and once, "--set", item, want)
        grid[key] = values
    return grid


def _one_spelling(text: str) -> str:
    """Return the same for texts of one number, such as 1e-3 and 0.001."""
    if not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=e))(e[-+]?\d+)?", text.lower()):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() else str(number)


def refuse_keys(items: Iterable[str], own: Sequence[str], where: str = "") -> None:
    """Refuse overrides of keys that a command sets itself."""
    for item in items:
        key = item.removeprefix("--").partition("=")[0].replace("-", "_")
        require(key not in own, where + key, item, "nothing: the command sets it for each run")


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
    different = len({point.name for point in points}) == len(points)
    require(different, "--set", group, "values whose names differ in letters or digits")
    return points


def settings_of(point: Point) -> dict[str, Any]:
    """Return what a point's result depends on, by dotted key: not its paths, logs or spelling."""
    config = build_job_config([f"--job.config_file={point.config}", *point.arguments])
    sections = config.to_dict()
    if (args := llama_args(config)) is not None:
        for section in ("low_rank", "caat", "model"):  # they make the arguments
            del sections[section]
        sections["model"] = {"hf_assets_path": config.model.hf_assets_path} | asdict(args)
    found = by_key({name: sections[name] for name in sections if name not in NO_EFFECT})
    unread = unread_keys(config.optimizer.name)
    read = {key: value for key, value in found.items() if not key.startswith(unread)}
    kept: dict[str, Any] = json.loads(json.dumps(read))  # tuples become lists
    return kept


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        want = "a file of a sweep; without it the point runs again"
        raise ConfigError("--out", str(path), want) from error


def read_results(work: Path, points: Iterable[Point]) -> None:
    """Set the rows of the points that were started in a folder; refuse other settings there."""
    for point in points:
        path = work / point.name / POINT_FILE
        if not path.is_file():
            continue
        known, here = _read(path), settings_of(point)
        for key, old in known["settings"].items():
            new = here.get(key, old)
            differs = f"{key} is {old!r} there and {new!r} here"
            want = f"a folder without a point {point.name} of other settings: {differs}"
            require(new == old, "--out", str(work), want)
        point.row = known["row"]


def losses_of(work: Path) -> dict[str, float]:
    """Return the validation losses of the points with a result; infinite where one diverged."""
    losses = {}
    for path in work.glob(f"*/{POINT_FILE}"):
        row = _read(path)["row"]
        if row["status"] in (FINISHED, DIVERGED):
            losses[path.parent.name] = row.get("val_loss") or math.inf
    return losses


class _Started(NamedTuple):
    point: Point
    gpus: list[str]  # its own ones
    process: subprocess.Popen[bytes]


class Sweep:
    """Points whose results are read from a folder, and those without one run there."""

    def __init__(self, work: Path, points: Sequence[Point], jobs: int = 1) -> None:
        self.work, self.points, self.jobs = work, points, jobs
        self._gpus: dict[str, int] = {}  # how many each point needs, if points share the machine
        read_results(work, points)

    def check(self) -> None:
        """Check the configuration of every point that is not done, before the first run."""
        for point in self.points:
            if point.is_done:
                continue
            folder = f"--job.dump_folder={self.work / point.name}"
            arguments = [f"--job.config_file={point.config}", *point.arguments, folder]
            try:
                placed = place_run(arguments, point.ranks)
            except ConfigError as error:
                key = f"{point.name}: {error.key}"
                raise ConfigError(key, error.got, error.want) from error
            args = llama_args(placed.config)  # None for another package's model
            point.row["parameters"] = args and sum(map(math.prod, model_shapes(args).values()))
            if self.jobs > 1 and placed.device == "cuda":
                self._gpus[point.name] = placed.environment.ranks

    def run(self, without: Collection[str] = ()) -> int:
        """Run the points that are not done; return 0 if all are, 1 if some failed.

        At a signal, which is an exception here, the active runs save and end.
        """
        self._write()
        waiting = [p for p in self.points if not p.is_done and p.name not in without]
        active: list[_Started] = []
        free = _visible_gpus() if self._gpus else []
        try:
            while active or waiting:
                while waiting and len(active) < self.jobs:
                    needed = self._gpus.get(waiting[0].name, 0)
                    if needed > len(free):
                        break
                    point, gpus, free = waiting.pop(0), free[:needed], free[needed:]
                    active.append(self._start(point, gpus))
                time.sleep(_POLL_SECONDS)
                for run in [run for run in active if run.process.poll() is not None]:
                    active.remove(run)
                    free += run.gpus
                    self._finish(run)
        except KeyboardInterrupt:
            say("stopped: run the same command to continue")
            raise
        finally:
            for run in active:
                run.process.terminate()
            for run in active:
                self._finish(run)
        return int(any(not point.is_done for point in self.points))

    def _start(self, point: Point, gpus: list[str]) -> _Started:
        """Start a point's training through the launcher; a run with a checkpoint resumes."""
        point.save(self.work, "cut off")  # the status if this process dies before the run's end
        say(f"{point.name}: starts")
        folder = self.work / point.name
        for earlier in (SUMMARY_FILE, run_folder.STATE_FILE):
            (folder / earlier).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "torchtitan_lr", "train", f"--job.config_file={point.config}"),
            *(f"--job.dump_folder={folder}", *point.arguments),
        ]
        environment = os.environ | {"CONFIG_FILE": point.config}
        if point.ranks is not None:
            environment["NGPU"] = str(point.ranks)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if self.jobs > 1:
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
        with (folder / _ERRORS_FILE).open("wb") as stderr:
            # In a session of its own: only this process receives Ctrl-C, and passes it on once.
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        return _Started(point, gpus, process)

    def _finish(self, run: _Started) -> None:
        """Wait for the end of a run, and write its result; `runs` shows those of running ones."""
        point, folder = run.point, self.work / run.point.name
        ended = run.process.wait()
        if ended != EXIT_STATUS[FINISHED]:
            # What refuses a run that the check has accepted may pass: it is repeated.
            status = DIVERGED if ended == EXIT_STATUS[DIVERGED] else FAILED
            point.save(self.work, status, self._why(folder, ended))
        elif (folder / SUMMARY_FILE).is_file():
            summary = read_json(folder / SUMMARY_FILE)
            point.row |= {key: summary[key] for key in ("steps", *RESULTS)}
            point.save(self.work, FINISHED)
        else:
            point.save(self.work, STOPPED, "before its last step")
        row = point.row
        told = ": ".join(filter(None, [point.name, row["status"], row["why"]]))
        if row.get("val_loss") is not None:
            told += f", validation loss {row['val_loss']:.4f}"
        say(escaped(told))
        self._write()

    def _why(self, folder: Path, status: int) -> str:
        """Return why a run failed: by its record, or its last words if that does not say it."""
        record = run_folder.read_state(folder) or {}  # a killed launcher writes no error
        if error := record.get("error"):
            return str(error)
        words = (folder / _ERRORS_FILE).read_text(errors="replace").strip().splitlines()
        return words[-1] if words else f"it ended with status {status}"

    def _write(self) -> None:
        rows = table_of(self.points)
        write_whole(self.work / "sweep.json", json.dumps(rows, indent=1) + "\n")
        write_whole(self.work / "sweep.md", as_markdown(rows) + "\n")


def _visible_gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [*map(str, range(gpu_count()))]


def table_of(points: Iterable[Point]) -> list[dict[str, Any]]:
    """Return the table: a row per point, its name, its settings, its status and its results."""
    return [{"point": point.name, **point.settings, **point.row} for point in points]


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Format a table as Markdown, without the points' names."""
    header = [key for key in dict.fromkeys(itertools.chain(*rows)) if key != "point"]
    return markdown_table(header, [[_cell(row.get(key)) for key in header] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        style = ",.0f" if abs(value) >= 1000 else ".4f" if abs(value) >= 0.1 else ".3g"
        return f"{value:{style}}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
