# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Training whose last two steps are measured: communication time and communicated bytes.

The launcher runs this module instead of `torchtitan_lr.train` if ``TRAIN_FILE`` is
``torchtitan_lr.scaling.measure``, which ``scripts/compare.py`` sets. The second-to-last step runs
under PyTorch's profiler, the last one under the ledger. All other steps are unchanged, so their
times in ``metrics.jsonl`` are unaffected. The results are in `MEASUREMENT_FILE` in the dump folder.
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
from torchtitan_lr.scaling.timing import MEASUREMENT_FILE
from torchtitan_lr.train import main
from torchtitan_lr.training.trainer import Trainer


class MeasuredTrainer(Trainer):
    """A trainer that measures its last two steps."""

    _watched: dict[str, Any]

    def _counted(self) -> AbstractContextManager[object]:
        left = self.job_config.training.steps - self.step
        if left == 1:
            return self._profiled()
        return self._ledgered() if left == 0 else nullcontext()

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        # Read before the profiler, which needs memory for its events.
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
        ledger = self.new_ledger()
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
    """Sum up the times of one rank's collectives from a profile.

    Args:
        events: Events of `torch.profiler.profile`. Gloo reports each collective as an event
            ``gloo:…`` of its worker threads, NCCL reports kernels.

    Returns:
        ``communication``: seconds in which at least one collective ran, including the wait for
        slower ranks; computation may overlap. ``collectives``: sum of the seconds of all
        collectives.
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
