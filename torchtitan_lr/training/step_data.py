# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The data of one optimizer step; all ranks compute the step or none does.

One all-reduce sums the valid tokens and the read failures of all ranks, so no rank starts a step
whose data another rank could not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.data.rows import Batch
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX
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

    microbatches: list[Batch]
    tokens: int
    global_tokens: float
    problem: str | None


class StepReader:
    """Reads micro-batches and combines the read failures of all ranks.

    Args:
        dataloader: The rank's loader; its position is stored before every step.
        device: The training device.
        copies: Ranks that read the same rows: tensor-parallel ranks times pipeline stages.
    """

    def __init__(self, dataloader: Any, device: torch.device, copies: int) -> None:
        self._loader = dataloader if isinstance(dataloader, TokenDataLoader) else None
        # The counts lie on the host, and so does their sum: on a device, reading it would wait for
        # the whole step before.
        self._host: dist.ProcessGroup | None = None
        if device.type != "cpu" and dist.get_world_size() > 1:
            self._host = dist.new_group(backend="gloo")
        self._copies = copies
        self._labels = 0  # of all ranks in the last step

    def read(self, data_iterator: Iterator[Batch], count: int) -> StepData:
        """Read a step's micro-batches; call it on every rank."""
        problem, microbatches = None, []
        if self._loader is not None:
            self._loader.mark()
        try:
            for _ in range(count):
                microbatches.append(next(data_iterator))
        except (ConfigError, RuntimeError) as error:  # a worker process raises the latter
            problem = str(error)
        tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in microbatches)
        global_tokens, any_failed = self.sum_over_ranks(tokens, int(problem is not None))
        self._labels = global_tokens // self._copies
        if any_failed:
            problem = first_rank_with(problem)
        return StepData(microbatches, tokens, global_tokens / self._copies, problem)

    def return_to_mark(self) -> None:
        """Restore the loader's state of before the last :meth:`read`, for the checkpoint."""
        if self._loader is not None:
            self._loader.return_to_mark()

    def metrics(self) -> dict[str, float]:
        """Return the shares of a mixture, and the number of labels in pairs."""
        if self._loader is None:
            return {}
        pairs = any(part.pairs for part in self._loader.dataset.parts)
        return self._loader.shares() | ({"label_tokens": self._labels} if pairs else {})

    def sum_over_ranks(self, *counts: int) -> list[int]:
        """Return each count summed over all ranks."""
        sums = torch.tensor(counts, dtype=torch.int64)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums, group=self._host)
        return [int(count) for count in sums.tolist()]
