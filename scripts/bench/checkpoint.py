# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure what checkpoints cost: the pause of a step, seconds to save and to load, bytes read.

    NGPU=4 python -m scripts.bench.checkpoint CONFIG [--modes ...] [--section.key=value ...]

Every mode trains with NGPU ranks (default 1) of this machine in a temporary folder; TMPDIR chooses
its disk. It saves --saves times, with --steps steps before and after each save, and loads the last
checkpoint, whose pages are dropped from memory before. Columns:

    step       seconds per step without a save, the median of the slowest rank
    pause      seconds that the save stops the run
    meanwhile  seconds per step that began while a background save was being written
    complete   seconds from the start of the save until the checkpoint is complete
    load       seconds to verify and load the checkpoint
    read       bytes that all ranks read in the load, over the checkpoint's size: by system calls,
               and from the storage device (the rest was in memory)

Exit status: 0, 1 if a run failed, 2 for wrong arguments.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_lr.training.register  # noqa: F401
from torchtitan_lr.checkpoints.folders import step_folder
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiments import place_run, report_from_rank, run_on_ranks
from torchtitan_lr.training.trainer import Trainer

MODES = ("disabled", "async", "async_with_pinned_mem")
HEADER = ["async_mode", "step", "pause", "meanwhile", "complete", "load", "read", "from device"]

WARMUP = 2
"""Steps before the first timed one: they create the optimizer's state."""

QUIET = [
    "--compile.no_enable",
    "--validation.no_enable",
    "--checkpoint.enable",
    "--checkpoint.keep_latest_k=0",
    "--checkpoint.initial_load_path=",
    "--lr_scheduler.warmup_steps=0",
    "--metrics.log_freq=1000000",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
]


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure every mode; print a table or JSON."""
    report_from_rank(measure, sys.argv[1:] if argv is None else argv)
    options = _parse(argv)
    steps = WARMUP + options.steps * (2 * options.saves + 1)
    arguments = [
        *(f"--job.config_file={options.config}", *options.overrides, *QUIET),
        *(f"--checkpoint.interval={options.steps}", f"--training.steps={steps}"),
    ]
    runs = {mode: [*arguments, f"--checkpoint.async_mode={mode}"] for mode in options.modes}
    # All are checked before the first one starts.
    placed = {mode: place_run(run, options.ranks) for mode, run in runs.items()}
    report: dict[str, Any] = {
        "ranks": options.ranks,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "modes": {
            mode: run_on_ranks("scripts.bench.checkpoint", run.arguments, options.ranks)
            for mode, run in placed.items()
        },
    }
    print(json.dumps(report, indent=1) if options.json else as_text(report))
    return 0


def as_text(report: dict[str, Any]) -> str:
    """Format the report as a table with a line about the checkpoint above it.

    Args:
        report: ``ranks``, ``cores``, ``load`` and, by mode, the results of
            `measure`.
    """
    found = next(iter(report["modes"].values()))
    parts = ", ".join(f"{part / 1e6:.1f}" for part in found["parts"])
    head = (
        f"{found['checkpoint'] / 1e6:.1f} MB by {report['ranks']} ranks ({parts}); "
        f"{report['cores']} cores, load {report['load']:.1f}"
    )
    rows = []
    for mode, row in report["modes"].items():
        meanwhile = row["step_while_saving"]
        times = [f"{row[name]:.3f}" for name in ("step", "pause")]
        times.append(f"{meanwhile:.3f}" if meanwhile else "-")
        times += [f"{row[name]:.3f}" for name in ("on_disk", "load")]
        reads = [row[name] for name in ("read", "from_device")]
        shares = ["-" if n is None else f"{n / row['checkpoint']:.2f}x" for n in reads]
        rows.append([mode, *times, *shares])
    return f"{head}\n{text_table(HEADER, rows)}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file; NGPU sets the ranks")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["disabled", "async"], help="async_mode"
    )
    parser.add_argument("--saves", type=int, default=3, help="saves of each mode")
    parser.add_argument("--steps", type=int, default=4, help="steps before and after each save")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.takes_overrides = True
    options = parser.parse_args(argv)
    check_at_least(options, saves=1, steps=1)
    world = os.environ.get("NGPU", "1")
    if not world.isdecimal() or int(world) < 1:
        raise ConfigError("NGPU", world, "a positive number")
    options.ranks = int(world)
    return options


_COUNTERS = Path("/proc/self/io")


def measure(arguments: list[str]) -> dict[str, Any]:
    """Train, save and load on this rank; call it on every rank.

    Args:
        arguments: Arguments of a training run. ``checkpoint.interval`` is the steps between two
            saves, ``training.steps`` the steps in all; what follows the last save is trained
            without another one.

    Returns:
        Seconds of the slowest rank: ``step`` (median without a save), ``pause`` (what a save
        stops the run, and the next step waits for its copy), ``step_while_saving`` (of steps that
        began before the save was complete, without this wait; 0 without one), ``on_disk`` (from
        the start of a save until it is complete), ``load``. Bytes: ``checkpoint``, ``parts`` of
        each rank, and what all ranks of the load ``read`` by system calls and ``from_device``
        (None where the kernel does not count).
    """
    config = build_job_config(arguments)
    trainer = Trainer(config)
    interval, steps = config.checkpoint.interval, config.training.steps
    times = _Times(trainer)
    times.train(WARMUP)
    while trainer.step + interval <= steps - interval:
        times.train(interval, times.quiet)
        times.save_and_go_on(interval)
    folder = Path(step_folder(trainer.checkpointer.folder, times.saved))
    loaded = _load(trainer, folder, times.saved)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    ranks = dist.get_world_size()
    result = {
        **{name: _slowest(value) for name, value in times.medians().items()},
        "load": _slowest(loaded.pop("seconds")),
        **{name: None if n is None else _total(n) for name, n in loaded.items()},
        "checkpoint": sum(sizes.values()),
        "parts": [_part(sizes, rank) for rank in range(ranks)],
    }
    trainer.close()
    return result


class _Times:
    """The seconds of steps and saves of one rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.quiet: list[float] = []
        self.during: list[float] = []
        self.pauses: list[float] = []
        self.on_disk: list[float] = []
        self.saved = 0
        self._waited = 0.0  # in a step, for the copy of a save
        self._trainer = trainer
        self._wait = trainer.checkpointer.maybe_wait_for_staging
        setattr(trainer.checkpointer, "maybe_wait_for_staging", self._timed_wait)  # noqa: B010
        self._batches: Iterator[Any] = iter(trainer.dataloader)

    def train(self, steps: int, into: list[float] | None = None) -> None:
        """Train some steps, and add their seconds to a list."""
        for _ in range(steps):
            seconds = _seconds(self._step)
            if into is not None:
                into.append(seconds)

    def save_and_go_on(self, steps: int) -> None:
        """Save the last step as the trainer does, train, and wait until the save is complete."""
        manager, step = self._trainer.checkpointer, self._trainer.step
        dist.barrier()
        begin = time.perf_counter()
        # `checkpoint.interval` decides in the trainer; here the warm-up shifts the steps.
        manager.interval, interval = step, manager.interval
        manager.save(step)
        manager.interval = interval
        self.pauses.append(time.perf_counter() - begin)
        for number in range(steps):
            writing = _is_writing(manager)
            self._waited = 0.0
            seconds = _seconds(self._step)
            if number == 0:  # the copy must end before the optimizer's step
                self.pauses[-1] += self._waited
                seconds -= self._waited
            if writing:
                self.during.append(seconds)
        manager.wait_for_save()
        # A save without background work ends with the pause, whatever is trained behind it.
        is_over = manager.async_mode == "disabled"
        self.on_disk.append(self.pauses[-1] if is_over else _age(step, manager, begin))
        self.saved = step
        dist.barrier()

    def medians(self) -> dict[str, float]:
        """Return the median of each kind of time."""
        return {
            "step": median(self.quiet),
            "pause": median(self.pauses),
            "step_while_saving": median(self.during) if self.during else 0.0,
            "on_disk": median(self.on_disk),
        }

    def _timed_wait(self) -> None:
        self._waited += _seconds(self._wait)

    def _step(self) -> None:
        self._trainer.step += 1
        self._trainer.gc_handler.run(self._trainer.step)
        self._trainer.train_step(self._batches)
        if self._trainer.device.type == "cuda":
            torch.cuda.synchronize()


def _is_writing(manager: Any) -> bool:
    return manager.save_future is not None and not manager.save_future.done()


def _age(step: int, manager: Any, begin: float) -> float:
    """Return the seconds from the start of a save until its last file was complete."""
    complete = os.stat(Path(manager.checkpoint_folder(step)) / ".metadata").st_mtime
    return complete - (time.time() - (time.perf_counter() - begin))


def _load(trainer: Trainer, folder: Path, step: int) -> dict[str, Any]:
    """Load a checkpoint whose pages were dropped from memory; return seconds and bytes."""
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            _drop_pages(path)
    dist.barrier()
    before = _bytes_read()
    seconds = _seconds(lambda: trainer.checkpointer.load(step))
    after = _bytes_read()
    if before is None or after is None:
        return {"seconds": seconds, "read": None, "from_device": None}
    return {"seconds": seconds, "read": after[0] - before[0], "from_device": after[1] - before[1]}


def _drop_pages(path: Path) -> None:
    """Drop a file from the page cache, so that the next read is from the device."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_read() -> tuple[int, int] | None:
    """Return the bytes that this process has read by system calls and from devices."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    found = dict(line.split(": ") for line in lines)
    return int(found["rchar"]), int(found["read_bytes"])


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _part(sizes: dict[str, int], rank: int) -> int:
    """Return the bytes of the files that one rank has written."""
    return sum(size for name, size in sizes.items() if name.startswith(f"__{rank}_"))


def _gathered(value: float) -> list[float]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _slowest(value: float) -> float:
    return max(_gathered(value))


def _total(value: float) -> float:
    return sum(_gathered(value))


if __name__ == "__main__":
    sys.exit(main())
