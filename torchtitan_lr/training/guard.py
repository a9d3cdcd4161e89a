# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What every rank must agree on before an optimizer step: is it finite, and has anyone to stop.

Both questions travel in one all-reduce of two integers, between backward and the optimizer step:
a signal that arrives while a step computes ends the run with that very step.
"""

import math
import signal
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class NonFiniteError(RuntimeError):
    """A loss or gradient became NaN or infinite and no more steps may be skipped."""


class BadDataError(RuntimeError):
    """A rank could not read its data; the run was saved as it was before the step."""


class StopSignal:
    """Remembers SIGTERM or SIGINT, so that the step at hand can be finished and saved.

    Attributes:
        name: The signal received, None so far.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        """Take over both signals; a second one acts as it would have without us."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        for other in _STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)


@dataclass(frozen=True)
class Verdict:
    """What the ranks agreed on.

    Attributes:
        nonfinite_rank: The first rank whose own loss is not finite, None if there is none.
        stop: Whether any rank received a stop signal.
    """

    nonfinite_rank: int | None
    stop: bool


def agree(loss: float, stop: bool, device: torch.device) -> Verdict:
    """Exchange one rank's findings with all others: one all-reduce (max) of two integers.

    Args:
        loss: This rank's loss of the step.
        stop: Whether this rank received a stop signal.
        device: Where the process group communicates.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # Counting ranks from the end makes the maximum name the first one.
    code = 0 if math.isfinite(loss) else world - rank
    findings = torch.tensor([code, int(stop)], dtype=torch.int64, device=device)
    if world > 1:
        dist.all_reduce(findings, op=dist.ReduceOp.MAX)
    worst, any_stop = findings.tolist()
    return Verdict(world - worst if worst else None, bool(any_stop))


def first_rank_with(found: str | None) -> str | None:
    """Exchange what each rank found; return ``rank R: FOUND`` of the first one, None if nobody did.

    Args:
        found: What this rank found, the same call on every rank.
    """
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    for rank, name in enumerate(everywhere):
        if name is not None:
            return f"rank {rank}: {name}"
    return None
