# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The training loader: a rank's rows of each global batch; its state is one integer.

Row k of the run, counted from 0, is a pure function of the corpus, the seed and k. A step at
position p trains on the rows ``p .. p + B - 1``, with ``training.global_batch_size`` B.

The seeded order needs no table, no memory and no time at the start. Each epoch permutes the windows
by a Feistel network (Luby and Rackoff, 1988) over the smallest power of two that holds them. A
result that is no window is encrypted again until it is one: cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002, section 4). The round function is integer arithmetic
alone, so the order is the same on every machine.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from fractions import Fraction
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lr.compat.interpreter import begin_worker
from torchtitan_lr.data.corpus import Batch, Indices, Rows, read_parts
from torchtitan_lr.data.prepare import open_rows
from torchtitan_lr.errors import require
from torchtitan_lr.titan.base import BaseTokenizer
from torchtitan_lr.titan.components import BaseDataLoader

Words = npt.NDArray[np.uint64]

ROUNDS = 6  # four suffice for a pseudo-random order; more help where the halves are small
MOST_SLOTS = 1 << 16  # longest period of a mixture; shares that need more are rounded to 1/65,536
LAST_READ_SECONDS = 10.0  # for a read to end when the run does; a storage may hang
_STEP, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


class TrainingRows(Dataset[Batch]):
    """The rows of a run in their order, from one corpus or from several in given shares.

    All parts have the same ``seq_len``. Without a ``seed`` each is read from its start to its end.
    ``identity`` is all that the order depends on, by the TOML's keys.
    """

    def __init__(self, parts: Sequence[Rows], seed: int | None = None) -> None:
        self.parts, self._seed = list(parts), seed
        self.shares = Shares([part.weight for part in parts])
        counts = zip(self.shares.counts.tolist(), parts, strict=True)
        each = ",".join(f"{n}*{part.corpus.identity[:16]}" for n, part in counts)
        key = "training.mixture" if len(self.parts) > 1 else "training.dataset"
        self.identity = {key: each, "training.seq_len": self.parts[0].seq_len}
        self.identity["training.shuffle_seed"] = seed

    @staticmethod
    def of(job_config: Any) -> TrainingRows:
        """Open the rows of a run; errors as for `open_rows`."""
        training, other = job_config.training, job_config.debug.seed or 0
        seed = other if training.shuffle_seed is None else training.shuffle_seed
        rows = open_rows(job_config, "training")
        return TrainingRows(rows, seed if training.shuffle else None)

    def __getitems__(self, rows: list[int]) -> Batch:
        """Read rows by their numbers, from 0 without end; PyTorch's fetcher calls this."""
        chosen, numbers = self.shares.choose(np.array(rows, dtype=np.int64))
        for index, part in enumerate(self.parts):
            own, size = chosen == index, len(part)
            if self._seed is None:
                numbers[own] %= size
            else:
                numbers[own] = shuffled(numbers[own], size, self._seed, index)
        return read_parts(self.parts, chosen, numbers)


class TokenDataLoader(BaseDataLoader):
    """Yields this rank's micro-batches, from the loader's position on and without end.

    Micro-batch m of a step at position p holds the global rows ``p + m D b + r b + i``, with D
    data-parallel ranks, this rank r, b rows per micro-batch (``local_batch_size``) and
    ``0 <= i < b``; m and r count from 0. The position is the first row, of all ranks together, that
    `StepReader.take` has not handed out; the reader moves it. Reading ahead does not, nor does it
    matter whether steps are rejected. ``options`` are those of PyTorch's loader.
    """

    def __init__(
        self,
        dataset: TrainingRows,
        *,
        local_batch_size: int,
        global_batch_size: int,
        dp_world_size: int,
        dp_rank: int,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.stride = local_batch_size * dp_world_size  # rows of a micro-batch of all ranks
        self.microbatches, rest = divmod(global_batch_size, self.stride)
        want = f"a multiple of {self.stride} (local_batch_size {local_batch_size} * "
        want += f"data-parallel size {dp_world_size})"
        fits = self.microbatches > 0 and not rest
        require(fits, "training.global_batch_size", global_batch_size, want)
        self.own = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.position = 0
        self.stopping: Callable[[], bool] = lambda: False  # whether a signal has come
        if not options.get("num_workers"):  # torch refuses the other two without it
            options |= {"persistent_workers": False, "prefetch_factor": None}
        self._options = options
        self._batches: Iterator[Batch] | None = None
        self._thread, self._next_batch = ThreadPoolExecutor(1), Future[Batch]()

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batches of ``b`` rows; a RuntimeError if a read does not end before a stop.

        A thread is one micro-batch ahead: when micro-batch j is yielded, it begins to read j + 1.
        Worker processes, if there are any, read ``prefetch_factor`` micro-batches each beyond it.
        """
        while True:
            if self._batches is None:  # at the start, and after `seek`
                self._batches = self._batches_from(self.position)
                self._next_batch = self._thread.submit(next, self._batches)
            if not ended(self._next_batch, self.stopping):
                raise RuntimeError("the next batch was not read yet when the run was stopped")
            batch = self._next_batch.result()
            self._next_batch = self._thread.submit(next, self._batches)
            yield batch

    def _batches_from(self, position: int) -> Iterator[Batch]:
        """Return the micro-batches from a position on; each is read when it is asked for."""

        def numbers() -> Iterator[list[int]]:
            for first in count(position, self.stride):
                yield [first + row for row in self.own]

        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "'set_vital'")
            # The rows of a batch are read together: there is nothing to collate.
            given = {"batch_sampler": numbers(), "collate_fn": tuple} | self._options
            begin = partial(begin_worker, os.getpid())
            return iter(StatefulDataLoader(self.dataset, worker_init_fn=begin, **given))

    def close(self) -> None:
        """End the thread and the worker processes."""
        # The thread holds the iterator, and so the workers, until it has ended.
        self._thread.shutdown(wait=self._drop())

    def seek(self, position: int) -> None:
        """Go to a position, in rows of all ranks."""
        self._drop()
        self.position = position

    def _drop(self) -> bool:
        """Drop what is read ahead; return whether no read runs any more."""
        ended = self._next_batch.cancel()
        ended = ended or not wait([self._next_batch], LAST_READ_SECONDS).not_done
        self._batches, self._next_batch = None, Future[Batch]()
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank."""
        return {"rows": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a stored position."""
        self.seek(int(state_dict["rows"]))


def ended(read: Future[Batch], stopping: Callable[[], bool]) -> bool:
    """Wait for a read; return whether it has ended before the run was stopped."""
    while wait([read], timeout=1).not_done:
        if stopping():
            return False
    return True


def shuffled(rows: Indices, size: int, *key: int) -> Indices:
    """Return the windows (n,), of ``0 .. size - 1``, that some rows (n,) of an endless order read.

    Every ``size`` rows are one epoch, which has each window once. Another ``key``, such as the
    seed, gives an unrelated order.
    """
    epochs, places = np.divmod(rows, size)
    windows, bits = np.empty_like(rows), max(2, (size - 1).bit_length())
    for epoch in np.unique(epochs).tolist():  # a batch is in one epoch, or across one border
        inside, keys = epochs == epoch, _round_keys(*key, epoch)
        images = _feistel(places[inside].astype(np.uint64), bits, keys)
        # The domain is less than twice as large as the windows: on average two walks are enough.
        while (outside := images >= size).any():
            images[outside] = _feistel(images[outside], bits, keys)
        windows[inside] = images
    return windows


def _feistel(values: Words, bits: int, keys: Words) -> Words:
    """Encrypt numbers of some bits; the halves' widths differ by one if the number is odd."""
    low, high = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for key in keys:
        # The half that is replaced has the width of the other half of the next round.
        left, right = right, left ^ _mixed(right + key) >> np.uint64(64 - high)
        low, high = high, low
    return left << np.uint64(low) | right


@lru_cache(maxsize=64)  # one for each part and epoch
def _round_keys(*key: int) -> Words:
    # Arrays, also of one number: numpy warns where a scalar overflows.
    seed = np.array([_STEP], dtype=np.uint64)
    for part in key:
        seed = _mixed(seed ^ _mixed(np.array([part + _STEP & _WORD], dtype=np.uint64)))
    return _mixed(np.uint64(_STEP) * np.arange(1, ROUNDS + 1, dtype=np.uint64) + seed)


def _mixed(values: Words) -> Words:
    """Return the finalizer of SplitMix64 (Steele et al., 2014) of each number."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Shares:
    """Says for each row of a mixture from which part it is, and which row of that part.

    After any n rows, part i has had more than ``n w_i - 1`` and fewer than ``n w_i + 1`` of them:
    the schedule is one period of a proportionate-fair one, by earliest pseudo-deadline (Baruah et
    al., "Proportionate progress", 1996). Part i's row number j is due in the slots from
    ``j / w_i`` to ``(j + 1) / w_i``, where w_i is its weight divided by the sum of all.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # A third is a third again, whatever its digits as a float.
        least = Fraction(1, MOST_SLOTS)
        exact = [max(Fraction(weight).limit_denominator(MOST_SLOTS), least) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        denominators = [share.denominator for share in shares]
        period = min(int(np.lcm.reduce(denominators, dtype=object)), MOST_SLOTS)
        counts = [max(1, round(share * period)) for share in shares]
        counts[int(np.argmax(counts))] += period - sum(counts)  # 0 unless the period was limited
        slots, before = list[int](), [[0] * len(counts)]
        for slot in range(period):
            given = before[-1].copy()
            rows_of_each = list(enumerate(zip(given, counts, strict=True)))
            due = [-(-(row + 1) * period // rows) for _, (row, rows) in rows_of_each]  # rounded up
            released = [i for i, (row, rows) in rows_of_each if row * period < (slot + 1) * rows]
            part = min(released, key=due.__getitem__)
            given[part] += 1
            slots.append(part)
            before.append(given)
        # Rows of each part in a period; the part of each row of it; rows of each before each slot.
        self.counts, self.slots, self._before = map(np.array, (counts, slots, before))

    def choose(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return for some rows (n,) the part of each (n,), and its number in that part (n,)."""
        periods, slots = np.divmod(rows, len(self.slots))
        parts = self.slots[slots]
        return parts, periods * self.counts[parts] + self._before[slots, parts]


def build_dataloader(
    *, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: Any
) -> TokenDataLoader:
    """Build the training loader of one data-parallel rank (a ``TrainSpec``'s hook)."""
    training = job_config.training
    local, rows = training.local_batch_size, training.global_batch_size
    rows = local * dp_world_size if rows < 0 else rows
    options = {**vars(training.dataloader), "local_batch_size": local, "global_batch_size": rows}
    options["pin_memory"] &= torch.cuda.is_available()
    options |= {"dp_world_size": dp_world_size, "dp_rank": dp_rank}
    return TokenDataLoader(TrainingRows.of(job_config), **options)
