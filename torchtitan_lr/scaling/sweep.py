# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A sweep: training runs that are checked together, run once each, and end in one table."""

import csv
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.config.build import build_job_config, config_class
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.parse import Override, apply_overrides
from torchtitan_lr.config.schema import NO_EFFECT
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError, RunFailedError, escaped
from torchtitan_lr.launch import run_state
from torchtitan_lr.launch.folder_lock import lock_file
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.scaling.start import Started, place_run, start
from torchtitan_lr.training.history import SUMMARY_FILE

POINT_FILE = "point.json"
"""In a point's folder: its `settings_of`, its arguments, and its row of the table."""

INTERRUPTED = 130  # exit status after a signal to stop

RESULTS = ("val_loss", "val_ppl", "train_loss", "tokens_per_s", "mfu", "peak_memory_gib")

SWEEP_KEYS = {
    "job.dump_folder": "each point has a folder of its own in --out",
    "job.config_file": "the TOML file is the first argument",
    "metrics.wandb_run_name": "each point has a name of its own",
    "metrics.wandb_group": "use --group",
}
"""Keys that a sweep sets for each point, and what to do instead."""

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
    row: dict[str, Any] = field(default_factory=dict)  # the point's status and results so far

    @property
    def is_done(self) -> bool:
        """Whether the run has finished or diverged, or cannot run."""
        return self.row["status"] in (run_state.FINISHED, run_state.DIVERGED, run_state.REFUSED)

    @property
    def outcome(self) -> str:
        """How the run ended, and why, as a line."""
        return _outcome(self.row)


def parse_grid(items: list[str]) -> dict[str, list[str]]:
    """Parse ``KEY=V1,V2`` items."""
    grid: dict[str, list[str]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        values = text.split(",")
        if not equals or "." not in key or not all(values):
            raise ConfigError("--set", item, "section.key=value,value")
        if key in grid:
            raise ConfigError("--set", item, f"each key once, {key} occurs twice")
        grid[key] = [_one_spelling(key, value) for value in values]
        if len({*grid[key]}) < len(values):
            raise ConfigError("--set", item, "each value once")
    return grid


def _one_spelling(key: str, text: str) -> str:
    """Return the same for texts of one number, such as 1e-3 and 0.001."""
    with suppress(ConfigError):  # the check of the points says what is wrong
        section, _, option = key.partition(".")
        value = apply_overrides({}, [Override(key, text)], config_class())[section][option]
        if isinstance(value, (int, float)):
            return str(value)
    return text


def refuse_keys(items: Sequence[str], own: Mapping[str, str], where: str = "") -> None:
    """Refuse overrides of keys that a command sets itself."""
    for item in items:
        key = item.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in own:
            raise ConfigError(where + key, item, f"nothing: {own[key]}")


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


@contextmanager
def locked_folder(work: Path) -> Iterator[IO[str]]:
    """Create and lock the folder of a sweep; runs that inherit the file keep the lock."""
    path = work / ".lock"
    try:
        work.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        want = f"a folder to write to ({error.strerror})"
        raise ConfigError("--out", str(work), want) from error
    with file:
        try:
            lock_file(file, path)
        except BlockingIOError:
            want = "a folder that no other sweep, nor a run left by one, is using"
            raise ConfigError("--out", str(work), want) from None
        yield file


class Sweep:
    """Points, their results, and the table."""

    def __init__(self, work: Path, points: Sequence[Point], jobs: int = 1) -> None:
        self.work, self.points, self.jobs = work, points, jobs
        self._gpus: dict[str, int] = {}  # how many each point needs, if points share the machine
        for point in points:
            path = work / point.name / POINT_FILE
            point.row = {"status": "to do"}
            if path.is_file():
                known = _read_point(path)
                if other := _difference(known["settings"], settings_of(point)):
                    want = f"a folder without a point {point.name} of other settings: {other}"
                    raise ConfigError("--out", str(work), want)
                point.row = known["row"]

    def check(self, skip_refused: bool = False) -> None:
        """Check every point's configuration before the first run."""
        refused: list[ConfigError] = []
        for point in self.points:
            folder = f"--job.dump_folder={self.work / point.name}"
            arguments = [f"--job.config_file={point.config}", *point.arguments, folder]
            try:
                placed = place_run(arguments, point.ranks)
            except ConfigError as error:
                if not skip_refused:
                    key = f"{point.name}: {error.key}"
                    raise ConfigError(key, error.got, error.want) from error
                point.row = {"status": run_state.REFUSED, "why": str(error)}
                refused.append(error)
                continue
            args = llama_args(placed.config)  # None for another package's model
            point.row["parameters"] = args and sum(map(math.prod, model_shapes(args).values()))
            if self.jobs > 1 and placed.device not in ("cpu", "cuda"):
                raise ConfigError("--jobs", self.jobs, f"1 on a machine with {placed.device}")
            if self.jobs > 1 and placed.device == "cuda":
                self._gpus[point.name] = placed.environment.ranks
        if len(refused) == len(self.points):
            raise refused[0]

    def run(self, lock: IO[str], without: Collection[str] = ()) -> int:
        """Run the points that are not done; return 0 if all are, 1 if some failed, 130 if stopped.

        A signal to stop saves the active ones and ends.
        """
        signals: list[str] = []

        def stop(number: int, frame: FrameType | None) -> None:
            signals.append(signal.Signals(number).name)

        stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in stops}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # `nohup` and `cmd &` ignore a signal: keep that
                signal.signal(number, stop)
        try:
            self._run(lock, signals, without)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if signals:
            print(f"stopped by {signals[0]}: run the same command to continue", file=sys.stderr)
            return INTERRUPTED
        return int(any(not point.is_done for point in self.points))

    def _run(self, lock: IO[str], signals: list[str], without: Collection[str]) -> None:
        self.write()
        waiting = [p for p in self.points if not p.is_done and p.name not in without]
        number = len(self.points) - len(waiting)  # those that are done have the first numbers
        active: list[tuple[Point, Started, list[str], int]] = []
        free: list[str] = []
        if self._gpus:
            import torch

            given = os.environ.get("CUDA_VISIBLE_DEVICES")
            free = given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]
        while active or (waiting and not signals):
            while waiting and len(active) < self.jobs and not signals:
                needed = self._gpus.get(waiting[0].name, 0)
                if needed > len(free):
                    break
                point, gpus, free = waiting.pop(0), free[:needed], free[needed:]
                number += 1
                self._say(number, point, "starts")
                active.append((point, self._start(point, gpus, lock), gpus, number))
            time.sleep(_POLL_SECONDS)
            if signals:
                for _, started, *_ in active:
                    started.process.terminate()
            for item in [item for item in active if signals or item[1].process.poll() is not None]:
                active.remove(item)
                free += item[2]
                self._finish(*item[:2])
                self._say(item[3], item[0], _result(item[0]))
                self.write()

    def _say(self, number: int, point: Point, what: str) -> None:
        place = f"{number}/{len(self.points)}"
        print(escaped(f"{place} {point.name}: {what}"), file=sys.stderr, flush=True)

    def _start(self, point: Point, gpus: list[str], lock: IO[str]) -> Started:
        self._save(point, "cut off")  # the status if this process dies before the run's end
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        if self.jobs > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
        folder = self.work / point.name
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        keep = [lock.fileno()]
        return start(point.config, folder, point.arguments, point.ranks, variables, keep)

    def _finish(self, point: Point, started: Started) -> None:
        folder = self.work / point.name
        path = folder / SUMMARY_FILE
        try:
            started.finish()
        except RunFailedError as error:
            status, why = run_state.FAILED, str(error)
            record = run_state.read_state(folder) or {"state": ""}
            # A refusal before any rank starts leaves no record. What refuses a run that the check
            # has accepted may pass: it is repeated.
            fails = record["state"] in run_state.FAILURES
            if fails and run_state.has_ended(record, started.began):
                why = str(record["error"])
                if record["state"] == run_state.DIVERGED:
                    status = run_state.DIVERGED
            self._save(point, status, why)
            return
        if not path.is_file():
            self._save(point, run_state.STOPPED, "before its last step")
            return
        summary = read_json(path)
        point.row |= {"steps": summary["steps"]} | {key: summary[key] for key in RESULTS}
        losses = [summary[key] for key in ("val_loss", "train_loss") if summary[key] is not None]
        self._save(
            point, run_state.FINISHED if all(map(math.isfinite, losses)) else run_state.DIVERGED
        )

    def _save(self, point: Point, status: str, why: str = "") -> None:
        point.row |= {"status": status, "why": why}
        path = self.work / point.name / POINT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = [point.config, *point.arguments]
        record = {"settings": settings_of(point), "arguments": arguments, "row": point.row}
        write_whole(path, json.dumps(record, indent=1) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: ``status``, ``why``, settings, ``parameters``, ``steps``, `RESULTS`."""
        keys = ("parameters", "steps", *RESULTS)
        rows = []
        for point in self.points:
            results = {key: point.row.get(key) for key in keys}
            named = {"point": point.name, "status": point.row["status"]}
            named["why"] = point.row.get("why", "")
            rows.append({**named, **point.settings, **results})
        return rows

    def write(self) -> None:
        """Write the table in three formats: sweep.json, sweep.csv and sweep.md."""
        rows = self.rows()
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.work / "sweep.json", json.dumps(rows, indent=1) + "\n")
        write_whole(self.work / "sweep.csv", table.getvalue())
        write_whole(self.work / "sweep.md", as_markdown(rows) + "\n")


def _result(point: Point) -> str:
    """Return how a point ended, with its losses, as a line; `runs` shows those of running ones."""
    found = point.outcome
    losses = {"validation loss": "val_loss", "training loss": "train_loss"}
    for what, key in losses.items():
        if point.row.get(key) is not None:
            found += f", {what} {point.row[key]:.4f}"
    return found


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


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the first key, with its values, in which two `settings_of` differ that have it."""
    for section, table in there.items():
        for key, old in table.items():
            new = here.get(section, {}).get(key, old)
            if old != new:
                return f"{section}.{key} is {old!r} there and {new!r} here"
    return ""


def recorded(work: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of all points that were started in a folder, by name."""
    paths = sorted(work.glob(f"*/{POINT_FILE}"))
    return {path.parent.name: _read_point(path)["row"] for path in paths}


def _read_point(path: Path) -> dict[str, Any]:
    """Read what `Sweep` has written of a point."""
    try:
        known = read_json(path)
        if isinstance(known["settings"], dict) and isinstance(known["row"]["status"], str):
            return known
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise ConfigError("--out", str(path), "a file of a sweep; without it the point runs again")


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table, without the points' names."""
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
