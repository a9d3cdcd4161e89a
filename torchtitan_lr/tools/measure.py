# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A training run whose last two steps are watched: how long ranks communicate, and how much.

The launcher starts it in place of `torchtitan_lr.train` where ``TRAIN_FILE`` says
``torchtitan_lr.tools.measure``, as ``scripts/compare.py`` does. The step before the last runs under
PyTorch's profiler, the last one under the ledger; all others are those of any run, so the times in
``metrics.jsonl`` are undisturbed. What was found is in `MEASUREMENT_FILE` of the dump folder.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from torchtitan_lr.launch.processes import exit_without_teardown
from torchtitan_lr.ledger.ledger import ledger_for
from torchtitan_lr.tools.timing import MEASUREMENT_FILE
from torchtitan_lr.train import main
from torchtitan_lr.training.trainer import Trainer


class MeasuredTrainer(Trainer):
    """A trainer that watches its last two steps."""

    _watched: dict[str, Any]

    def _counted(self) -> AbstractContextManager[object]:
        left = self.job_config.training.steps - self.step
        if left == 1:
            return self._profiled()
        return self._ledgered() if left == 0 else nullcontext()

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        # In front of the profiler, which takes memory for its events.
        memory = self.metrics_processor.device_memory_monitor.get_peak_stats()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            begin = time.perf_counter()
            yield
            self._synchronize()
            seconds = time.perf_counter() - begin
        mine = {
            "peak_memory_gib": memory.max_reserved_gib,
            "profiled_step": seconds,
            **communication_seconds(profiler.events()),
        }
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, mine)
        self._watched = {"ranks": every}

    @contextmanager
    def _ledgered(self) -> Iterator[None]:
        ledger = ledger_for(self.parallel_dims, self.model_parts)
        with ledger:
            yield
        if torch.distributed.get_rank() == 0:
            path = Path(self.job_config.job.dump_folder) / MEASUREMENT_FILE
            found = {"rows": ledger.rows(), **self._watched}
            path.write_text(json.dumps(found, indent=1) + "\n")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def communication_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Add up what a profiler saw of the collectives of one rank.

    Args:
        events: Of `torch.profiler.profile`. Gloo reports each collective as an event ``gloo:…`` of
            its worker threads, NCCL as kernels.

    Returns:
        ``communication``: seconds in which at least one collective ran, the waiting for slower
        ranks included; computation may have run at the same time. ``collectives``: the seconds
        of all collectives added up.
    """
    spans = []
    for event in events:
        kernel = event.device_type == DeviceType.CUDA and "nccl" in event.name.lower()
        if kernel or event.name.startswith("gloo:"):
            spans.append((event.time_range.start, event.time_range.end))
    return {
        "communication": union_length(spans) / 1e6,
        "collectives": sum(end - start for start, end in spans) / 1e6,
    }


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, in their unit."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


if __name__ == "__main__":
    exit_without_teardown(main(trainer_class=MeasuredTrainer))
