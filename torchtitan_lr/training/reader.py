# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank's data for a step, read one step ahead.

The micro-batches of step k are read during step k - 1, while the device computes. The verdict on
step k - 1 sums what the ranks have read. So no rank starts a step whose data another rank could not
read, and no rank waits for others between two steps. Only a run's first step has a sum of its own.

A run's position is ``TokenDataLoader.position``, the rows of all ranks in the steps that have
begun. It moves in `StepReader.take`, not when rows are read ahead, and a checkpoint holds it. A run
that resumes on more or fewer ranks goes on at that row.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan_lr.agreement import first_rank_with, from_first_rank
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.errors import ConfigError, RunFailedError, require
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.components import DataloaderExhaustedError


class BadDataError(RunFailedError):
    """A rank could not read its data of a step."""


@dataclass
class StepData:
    """One rank's data for one step.

    Attributes:
        microbatches: ``({"input": (b, s)}, labels (b, s))`` each, on the CPU.
        tokens: Valid tokens in the micro-batches.
        counts: Numbers to sum over ranks: valid tokens, read failures, ends of data.
        global_tokens: Valid tokens of all ranks' micro-batches; NaN until they are summed.
        problem: Why this rank could not read all of them; None if it could.
    """

    microbatches: list[Batch]
    tokens: int
    counts: tuple[float, ...]
    global_tokens: float = math.nan
    problem: str | None = None


class StepReader:
    """Reads the micro-batches of one step after another, and knows what all ranks have read.

    Args:
        loader: Its position goes on with each step.
        device: The process group's device.
        copies: Ranks that read the same rows: tensor-parallel ranks times pipeline stages.
        seconds: Gets the seconds of each micro-batch's reading.

    Attributes:
        next_sums: The counts of the next step's data over all ranks, set once the verdict is read;
            empty if nothing was read ahead.
    """

    def __init__(
        self, loader: TokenDataLoader, device: torch.device, copies: int, seconds: list[float]
    ) -> None:
        self._loader, self._device, self._copies = loader, device, copies
        self._seconds = seconds
        self._next: StepData | None = None
        self.next_sums: tuple[float, ...] = ()
        self._labels = 0  # of all ranks in the last step

    def take(self, data_iterator: Iterator[Batch]) -> StepData:
        """Return a step's data: those read ahead, or else read here and summed here.

        Call it on every rank.

        Raises:
            BadDataError: A rank could not read its data; on all of them.
            DataloaderExhaustedError: A rank has no more data; likewise.
        """
        data, sums = self._next, self.next_sums
        if data is None or not sums or sums[2]:
            data = self.read_next(data_iterator)
            sums = data.counts
            if dist.get_world_size() > 1:
                numbers = torch.tensor(sums, dtype=torch.float64, device=self._device)
                dist.all_reduce(numbers)
                sums = tuple(numbers.tolist())
        self._next, self.next_sums = None, ()
        tokens, failed, ended = sums
        if ended:
            raise DataloaderExhaustedError
        if failed:
            raise BadDataError(first_rank_with(data.problem))
        self._loader.position += self._loader.stride * self._loader.microbatches
        # Sums of integers below 2^53 are exact.
        self._labels, data.global_tokens = int(tokens) // self._copies, tokens / self._copies
        return data

    def read_next(self, data_iterator: Iterator[Batch]) -> StepData:
        """Read the next step's micro-batches; the verdict on this step sums their counts."""
        microbatches: list[Batch] = []
        problem, ended = None, False
        try:
            for _ in range(self._loader.microbatches):
                start = time.perf_counter()
                microbatches.append(next(data_iterator))
                self._seconds.append(time.perf_counter() - start)
        except StopIteration:
            ended = True
        except (ConfigError, RuntimeError) as error:  # a worker process raises a RuntimeError
            problem = str(error)
        arrays = (labels.numpy() for _, labels in microbatches)
        tokens = sum(int((labels != IGNORE_INDEX).sum()) for labels in arrays)
        counts = tokens, problem is not None, ended
        self._next = StepData(microbatches, tokens, counts, problem=problem)
        return self._next

    def metrics(self) -> dict[str, float]:
        """Return the shares of a mixture, and the number of labels in pairs."""
        pairs = any(part.pairs for part in self._loader.dataset.parts)
        return self._loader.shares() | ({"label_tokens": self._labels} if pairs else {})


def check_same_data(identity: str) -> None:
    """Compare the prepared tokens (`TrainingRows.identity`) of all ranks.

    Machines without a shared folder have their own.

    Raises:
        ConfigError: A rank reads other tokens; on every rank.
    """
    first = from_first_rank(identity)
    other = first_rank_with(None if identity == first else identity)
    want = f"the same tokens on all machines; rank 0 has {first}"
    require(other is None, "training.dataset", other, want)
