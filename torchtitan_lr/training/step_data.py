# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The data of one optimizer step; all ranks compute the step or none does.

One all-reduce sums the valid tokens, the skipped records and the read failures of all ranks, so no
rank starts a step whose data another rank could not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lr.data.batches import MicroBatch
from torchtitan_lr.data.dataloader import StripeDataLoader
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX, logger
from torchtitan_lr.training.guard import first_rank_with


@dataclass(frozen=True)
class StepData:
    """One rank's data for one step.

    Attributes:
        microbatches: ``({"input": (b, s)}, labels (b, s))`` each, on the CPU.
        tokens: Valid tokens in them.
        global_tokens: Valid tokens of all ranks' micro-batches.
        problem: Why the step cannot be computed, the same text on all ranks; None if it can.
    """

    microbatches: list[MicroBatch]
    tokens: int
    global_tokens: float
    problem: str | None


class StepReader:
    """Reads micro-batches and combines the read failures of all ranks.

    Args:
        dataloader: The rank's loader; its position is stored before every step.
        device: The training device.
        copies: Ranks that read the same rows: tensor-parallel ranks times pipeline stages.
        max_bad_records: Number of records that may be skipped in the whole run, over all ranks.

    Attributes:
        bad_records: Locations of the records skipped on any rank, without duplicates.
    """

    def __init__(
        self, dataloader: Any, device: torch.device, copies: int, max_bad_records: int
    ) -> None:
        self._loader = dataloader if isinstance(dataloader, StripeDataLoader) else None
        # The counts lie on the host, and so does their sum: on a device, reading it would wait for
        # the whole step before.
        self._host: dist.ProcessGroup | None = None
        if device.type != "cpu" and dist.get_world_size() > 1:
            self._host = dist.new_group(backend="gloo")
        self._copies = copies
        self._max_bad_records = max_bad_records
        self._labels = 0  # of all ranks in the last step
        self.bad_records: set[str] = set()

    def read(self, data_iterator: Iterator[MicroBatch], count: int, step: int) -> StepData:
        """Read a step's micro-batches; call it on every rank."""
        problem, microbatches = None, []
        if self._loader is not None:
            self._loader.mark()
        try:
            for _ in range(count):
                microbatches.append(next(data_iterator))
        except ConfigError as error:
            problem = str(error)
        tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in microbatches)
        skipped = self._loader.bad_records - self.bad_records if self._loader else set()
        counts = self.sum_over_ranks(tokens, len(skipped), int(problem is not None))
        global_tokens, any_skipped, any_failed = counts
        self._labels = global_tokens // self._copies
        if any_skipped:
            problem = self._count_skipped(skipped, step) or problem
        if any_failed or problem is not None:
            problem = first_rank_with(problem)
        return StepData(microbatches, tokens, global_tokens / self._copies, problem)

    def return_to_mark(self) -> None:
        """Restore the loader's state of before the last :meth:`read`, for the checkpoint."""
        if self._loader is not None:
            self._loader.return_to_mark()

    def metrics(self) -> dict[str, float]:
        """Return the number of skipped records, if skipping is allowed, and what the loader adds.

        That is the number of labels in pairs, and the shares of a mixture.
        """
        found: dict[str, float] = {}
        if self._max_bad_records:
            found["bad_records"] = len(self.bad_records)
        if self._loader is not None:
            found |= self._loader.shares()
            if self._loader.pairs:
                found["label_tokens"] = self._labels
        return found

    def sum_over_ranks(self, *counts: int) -> list[int]:
        """Return each count summed over all ranks."""
        sums = torch.tensor(counts, dtype=torch.int64)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums, group=self._host)
        return [int(count) for count in sums.tolist()]

    def _count_skipped(self, skipped: set[str], step: int) -> str | None:
        """Collect the records skipped on all ranks; return an error text if they are too many."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, sorted(skipped))
        new = sorted(set().union(*everywhere) - self.bad_records)
        self.bad_records.update(new)
        logger.warning("step %d: skipped unreadable records: %s", step, ", ".join(new))
        if len(self.bad_records) <= self._max_bad_records:
            return None
        return f"{len(self.bad_records)} records are unreadable, the last at {new[-1]}"
