# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank's data for a step, collected one step ahead.

The next step's micro-batches are read while the device computes, and the verdict on a step sums
what the ranks have. So no rank starts a step whose data another could not read, and none waits
between two steps. A run's position, ``TokenDataLoader.position``, is the rows of all steps handed
out: it moves in `StepReader.take`, and a checkpoint holds it for any number of ranks.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan_lr.agreement import first_rank_with, from_first_rank
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.errors import ConfigError, RunFailedError, require
from torchtitan_lr.parallel.context import context_ranks, own_tokens
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import ParallelDims


class Counts(NamedTuple):
    """What ranks tell each other of one step's data; all are summed over the ranks."""

    tokens: float  # valid tokens
    failed: float  # 1 if a micro-batch could not be read, else 0
    ended: float  # 1 if the data ended before the last micro-batch, else 0


class BadDataError(RunFailedError):
    """A rank could not read its data of a step."""


@dataclass
class StepData:
    """One rank's data for one step."""

    microbatches: list[Batch]  # ``({"input": (b, s)}, labels (b, s))`` each, on the CPU
    tokens: int  # valid tokens in the micro-batches
    counts: Counts  # this rank's
    problem: str | None = None  # why this rank could not read all of them; None if it could
    # Valid tokens of all ranks' micro-batches; NaN until they are summed
    global_tokens: float = math.nan


class StepReader:
    """Reads the micro-batches of one step after another, and knows what all ranks have read."""

    def __init__(
        self,
        loader: TokenDataLoader,
        dims: ParallelDims,
        device: torch.device,
        seconds: list[float],
    ) -> None:
        self._loader, self._device = loader, device  # the process group's device
        self._copies = dims.tp * dims.pp  # ranks that read the same tokens
        self._context = context_ranks(dims)  # ranks that share each row's tokens
        self._seconds = seconds  # gets those of each micro-batch's reading
        self._next: StepData | None = None
        self.next_sums: tuple[float, ...] = ()  # `Counts` of all ranks, if any were read ahead

    def take(self, data_iterator: Iterator[Batch]) -> StepData:
        """Return a step's data: those read ahead, or else read here and summed here.

        One that some rank could not read is a `BadDataError` on all.
        """
        data, sums = self._next, Counts(*self.next_sums) if self.next_sums else None
        # Data that ended while they were read ahead may go on here, in another iterator.
        if data is None or sums is None or sums.ended:
            data = self.read_next(data_iterator)
            sums = data.counts
            if dist.get_world_size() > 1:
                found = torch.tensor(sums, dtype=torch.float64, device=self._device)
                dist.all_reduce(found)
                sums = Counts(*found.tolist())
        self._next, self.next_sums = None, ()
        if sums.failed:
            problem = first_rank_with(data.problem)
            assert problem is not None  # one of them has counted its own
            raise BadDataError(f"rank {problem[0]}: {problem[1]}", problem[0])
        self._loader.position += self._loader.stride * self._loader.microbatches
        # Sums of integers below 2^53 are exact.
        data.global_tokens = sums.tokens / self._copies
        return data

    def read_next(self, data_iterator: Iterator[Batch]) -> StepData:
        """Read the micro-batches that the next `take` returns."""
        microbatches: list[Batch] = []
        problem, ended = None, False
        try:
            for _ in range(self._loader.microbatches):
                start = time.perf_counter()
                microbatches.append(own_tokens(next(data_iterator), self._context))
                self._seconds.append(time.perf_counter() - start)
        except StopIteration:
            problem, ended = "the data have ended", True
        except (ConfigError, RuntimeError) as error:  # a worker process raises a RuntimeError
            problem = str(error)
        tokens = sum(int((labels.numpy() != IGNORE_INDEX).sum()) for _, labels in microbatches)
        counts = Counts(tokens, problem is not None, ended)
        self._next = StepData(microbatches, tokens, counts, problem)
        return self._next

    def metrics(self, data: StepData) -> dict[str, float]:
        """Return the number of a step's labels in pairs."""
        pairs = any(part.pairs for part in self._loader.dataset.parts)
        return {"label_tokens": int(data.global_tokens)} if pairs else {}


def check_same_data(identity: dict[str, Any]) -> None:
    """Compare all ranks' `TrainingRows.identity`: machines may have tokens of their own."""
    first = from_first_rank(identity)
    other = first_rank_with(None if identity == first else str(identity))
    want = f"the same tokens on all machines; rank 0 has {first}"
    require(other is None, "training.dataset", other and f"rank {other[0]}: {other[1]}", want)
