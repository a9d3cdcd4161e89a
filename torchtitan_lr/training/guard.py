# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Agreement of all ranks before an optimizer step: finite loss, and pending stop signals.

One all-reduce of two integers, between backward and the optimizer step, carries both values. A
signal that arrives during a step therefore stops the run after the same step.
"""

import math
import signal
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite, and ``training.max_skipped_steps`` is used up."""


class BadDataError(RuntimeError):
    """A rank could not read its data; the run was saved in its state before the step."""


class StopSignal:
    """Records SIGTERM or SIGINT, so that the trainer can finish and save the current step.

    Attributes:
        name: The received signal, None until one arrives.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        """Handle both signals; a second signal has its default action."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        for other in _STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)


@dataclass(frozen=True)
class Verdict:
    """The result of `agree`, equal on all ranks.

    Attributes:
        nonfinite_rank: The first rank whose own loss is not finite, None if there is none.
        stop: Whether any rank received a stop signal.
    """

    nonfinite_rank: int | None
    stop: bool


def agree(loss: float, stop: bool, device: torch.device) -> Verdict:
    """Combine all ranks' values in one all-reduce (max) of two integers.

    Args:
        loss: This rank's loss of the step.
        stop: Whether this rank received a stop signal.
        device: The process group's device.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # world - rank is largest for the first rank, so the maximum selects that rank.
    code = 0 if math.isfinite(loss) else world - rank
    findings = torch.tensor([code, int(stop)], dtype=torch.int64, device=device)
    if world > 1:
        dist.all_reduce(findings, op=dist.ReduceOp.MAX)
    worst, any_stop = findings.tolist()
    return Verdict(world - worst if worst else None, bool(any_stop))


def first_rank_with(found: str | None) -> str | None:
    """Return ``rank R: FOUND`` for the first rank whose ``found`` is not None, else None.

    Call it on every rank; the result is the same on all.

    Args:
        found: This rank's finding.
    """
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    for rank, name in enumerate(everywhere):
        if name is not None:
            return f"rank {rank}: {name}"
    return None
