# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure a run's checkpoints: the pause of a step, seconds, and bytes read by all ranks.

Every rank trains a few steps with the real trainer, saves, goes on while a background save is
written, and loads the last checkpoint from the storage device.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_lr.training.register  # noqa: F401
from torchtitan_lr.checkpoints.layout import step_folder
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.training.trainer import Trainer

WARMUP = 2
"""Steps before the first timed one: they create the optimizer's state."""

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
        self._trainer = trainer
        self._batches: Iterator[Any] = trainer.batch_generator(trainer.dataloader)

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
            seconds = _seconds(self._step)
            if number == 0:  # the copy must end before the optimizer's step
                self.pauses[-1] += manager.waited
                seconds -= manager.waited
            if writing:
                self.during.append(seconds)
        manager.finish()
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
