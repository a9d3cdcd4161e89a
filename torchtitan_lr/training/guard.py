# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Agreement of all ranks on each step: its data, gradient norm, finite loss, stop signals.

One all-reduce between backward and the optimizer step is the verdict. Its result stays on the
device: the norm clips, and the verdict skips the optimizer step. The host reads its copy of them
after it has queued the step, at the latest before the next one. A signal that arrives before that
all-reduce therefore stops the run after that very step.

The next step's data are read before it, while the device computes, and the verdict sums their valid
tokens and read failures too. So no rank starts a step whose data another rank could not read, and
no rank waits for others between two steps. Only a run's first step has a sum of its own.
"""

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.agreement import first_rank_with, from_first_rank
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.errors import ConfigError, RunFailedError, require
from torchtitan_lr.optim.step import HostCopy
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.components import DataloaderExhaustedError

MACHINES_CHANGED = "a change of machines"
"""Name of SIGUSR2, with which `launch.agent` ends the ranks to start them again."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class NonFiniteError(RunFailedError):
    """A loss or gradient is NaN or infinite, and ``training.max_skipped_steps`` is used up."""


class BadDataError(RunFailedError):
    """A rank could not read its data; the run was saved in its state before the step."""


@dataclass
class StepData:
    """One rank's data for one step.

    Attributes:
        microbatches: ``({"input": (b, s)}, labels (b, s))`` each, on the CPU.
        tokens: Valid tokens in them.
        counts: What is summed over ranks: valid tokens, read failures, ends of data.
        global_tokens: Valid tokens of all ranks' micro-batches; NaN until they are summed.
        problem: Why the step cannot be computed; once summed, the same text on all ranks. None if
            it can.
    """

    microbatches: list[Batch]
    tokens: int
    counts: tuple[float, ...]
    global_tokens: float = math.nan
    problem: str | None = None


class StepReader:
    """Reads a loader's micro-batches, and combines the counts and failures of all ranks.

    The loader's position goes on when a step takes its data, not when they are read ahead: a
    checkpoint between two steps holds the position before the second one.

    Args:
        loader: Whose position goes on.
        device: Of the process group.
        copies: Ranks that read the same rows: tensor-parallel ranks times pipeline stages.
        seconds: Gets the seconds of each micro-batch's reading.

    Attributes:
        sums: The counts of all ranks of what was read ahead; empty until the verdict is read.
    """

    def __init__(
        self, loader: TokenDataLoader, device: torch.device, copies: int, seconds: list[float]
    ) -> None:
        self._loader, self._device, self._copies = loader, device, copies
        self._seconds = seconds
        self._ahead: StepData | None = None
        self.sums: tuple[float, ...] = ()
        self._labels = 0  # of all ranks in the last step

    def take(self, data_iterator: Iterator[Batch], count: int) -> StepData:
        """Return a step's data: those that were read ahead, or else read here, with an own sum.

        Call it on every rank.

        Raises:
            DataloaderExhaustedError: A rank has no more data; on all of them.
        """
        data, sums = self._ahead, self.sums
        if data is None or not sums or sums[2]:
            data = self.read_ahead(data_iterator, count)
            sums = data.counts
            if dist.get_world_size() > 1:
                numbers = torch.tensor(sums, dtype=torch.float64, device=self._device)
                dist.all_reduce(numbers)
                sums = tuple(numbers.tolist())
        self._ahead, self.sums = None, ()
        tokens, failed, ended = sums
        if ended:
            raise DataloaderExhaustedError
        if failed:
            data.problem = first_rank_with(data.problem)
        else:
            self._loader.rows += self._loader.stride * count
        # Sums of integers below 2^53 are exact.
        self._labels, data.global_tokens = int(tokens) // self._copies, tokens / self._copies
        return data

    def read_ahead(self, data_iterator: Iterator[Batch], count: int) -> StepData:
        """Read the next step's micro-batches; the verdict sums their counts."""
        microbatches: list[Batch] = []
        problem, ended = None, False
        try:
            for _ in range(count):
                start = time.perf_counter()
                microbatches.append(next(data_iterator))
                self._seconds.append(time.perf_counter() - start)
        except StopIteration:
            ended = True
        except (ConfigError, RuntimeError) as error:  # a worker process raises the latter
            problem = str(error)
        arrays = (labels.numpy() for _, labels in microbatches)
        tokens = sum(int((labels != IGNORE_INDEX).sum()) for labels in arrays)
        counts = tokens, problem is not None, ended
        self._ahead = StepData(microbatches, tokens, counts, problem=problem)
        return self._ahead

    def metrics(self) -> dict[str, float]:
        """Return the shares of a mixture, and the number of labels in pairs."""
        pairs = any(part.pairs for part in self._loader.dataset.parts)
        return self._loader.shares() | ({"label_tokens": self._labels} if pairs else {})


@dataclass
class StopSignal:
    """Records a signal to stop, so that the trainer can finish and save its step.

    Attributes:
        name: The received signal, or `MACHINES_CHANGED`; None until one arrives.
    """

    name: str | None = None

    def install(self) -> None:
        """Handle the signals; a second signal has its default action.

        Below torchrun a second signal is ignored: torchrun or the launcher kills. A scheduler such
        as Slurm signals all processes of a job, so a rank receives its signal and the launcher's.
        """

        def receive(number: int, frame: FrameType | None) -> None:
            self.name = signal.Signals(number).name
            if number == signal.SIGUSR2:
                self.name = MACHINES_CHANGED
            later = signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL
            for other in _STOP_SIGNALS:
                signal.signal(other, later)

        for number in _STOP_SIGNALS:
            signal.signal(number, receive)


@dataclass(frozen=True)
class Findings:
    """What the host reads of a `Verdict`, equal on all ranks but for ``loss_is_finite``."""

    rejected: bool
    """Whether the optimizer step was skipped."""
    norm: float
    """The norm of the full gradient."""
    bad_losses: int
    """Number of ranks whose own loss is not finite."""
    stop: bool
    """Whether any rank received a stop signal."""
    loss_is_finite: bool
    """Whether this rank's own loss is finite."""
    counts: tuple[float, ...] = ()
    """The sums of the counts of what was read ahead."""


class Verdict:
    """What all ranks agree on for one step, on the device.

    Args:
        loss: This rank's loss of the step, a scalar on the process group's device.
        share: This rank's share of the squared gradient norm, a scalar.
        stop: Whether this rank received a stop signal.
        counts: Numbers of this rank to sum as well: those of what was read ahead.

    Attributes:
        norm: The norm of the full gradient, an fp64 scalar, equal on all ranks.
        rejected: 1 if the norm or a rank's loss is not finite, else 0; an fp32 scalar.
    """

    def __init__(
        self, loss: Tensor, share: Tensor, stop: bool, counts: Sequence[float] = ()
    ) -> None:
        bad = (~loss.isfinite()).double()
        # Fills of the device's memory, not copies from the host's.
        known = [torch.full_like(bad, float(number)) for number in (stop, *counts)]
        sums = torch.stack([share.to(loss.device, torch.float64), bad, *known])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        square, losses = sums[:2].unbind()
        self.norm = square.sqrt()
        self.rejected = ((losses > 0) | ~self.norm.isfinite()).float()
        own = torch.stack([bad, self.rejected.double()])
        self._numbers = HostCopy(torch.cat([sums, own]))

    def read(self) -> Findings:
        """Return the verdict on the host; waits for the all-reduce, not for the optimizer."""
        square, losses, stops, *counts, bad, rejected = self._numbers.read()
        norm = math.sqrt(square) if square >= 0 else math.nan
        return Findings(rejected > 0, norm, int(losses), stops > 0, not bad, tuple(counts))


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
