# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The verdict on a step: the ranks' common decision between backward and the optimizer.

It is one all-reduce, whose result stays on the device: the norm clips the gradients, ``rejected``
makes the optimizer leave the step out. The host reads a copy once the step is queued.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.numerics import HostCopy


class NonFiniteError(RunFailedError):
    """A loss or gradient is NaN or infinite, and ``training.max_skipped_steps`` is used up."""


@dataclass(frozen=True)
class Findings:
    """What the host reads of a `Verdict`, equal on all ranks but for ``loss_is_finite``."""

    rejected: bool  # whether the optimizer left the step out
    norm: float  # the norm of the full gradient
    bad_ranks: int  # number of ranks whose own loss is not finite
    stop: bool  # whether any rank received a stop signal
    loss_is_finite: bool  # whether this rank's own loss is finite
    next_counts: tuple[float, ...] = ()  # the sums of ``next_counts`` over the ranks
    depth: float = math.inf
    """The first block of this rank whose output is not finite, of those that are looked at."""


class Depth:
    """The first block whose output is not finite in a step, on the device.

    A NaN reaches ranks that have not made it; who has sees it in an earlier block. Of a pipeline's
    stage the last block is looked at, and where ranks share rows every one.
    """

    def __init__(self, parts: Sequence[nn.Module], every_block: bool, device: torch.device) -> None:
        self.least = torch.full((), math.inf, device=device)
        for part in parts:
            blocks = list(part.get_submodule("layers").named_children())
            for name, block in blocks if every_block else blocks[-1:]:
                block.register_forward_hook(partial(self._note, int(name)))

    def clear(self) -> None:
        """Begin a step."""
        self.least.fill_(math.inf)

    def _note(self, depth: int, block: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # a validation
            return
        x = local_part(output[0] if isinstance(output, tuple) else output).detach()
        total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
        self.least.copy_(torch.where(total.isfinite(), self.least, self.least.clamp(max=depth)))


class Verdict:
    """The ranks' common decision on one step, on the device; `all_reduced` makes it.

    `sums` are over all ranks, (3 + counts,) in fp64: the squared gradient norm, the number of ranks
    whose loss is not finite, the number of stop signals, and the counts of the next data.
    """

    def __init__(self, sums: Tensor, bad: Tensor, depth: Tensor | None = None) -> None:
        square, bad_ranks = sums[:2].unbind()
        self.norm = square.sqrt()  # of the full gradient, an fp64 scalar
        # A NaN of one rank is in the sums of all: every rank rejects the step. Second moments and
        # Gram matrices are in fp32, whose largest number is 3.4e38.
        overflows = ~self.norm.float().square().isfinite()
        self.rejected = ((bad_ranks > 0) | overflows).float()  # 1 or 0
        deep = torch.full_like(bad, math.inf) if depth is None else depth.double()
        own = torch.stack([bad, self.rejected.double(), deep])
        self._numbers = HostCopy(torch.cat([sums, own]))

    @classmethod
    def all_reduced(
        cls,
        loss: Tensor,
        share: Tensor,
        stop: bool,
        next_counts: Sequence[float] = (),
        depth: Tensor | None = None,
    ) -> "Verdict":
        """Decide with all ranks, in one all-reduce."""
        bad = (~loss.isfinite()).double()
        # Fills of the device's memory, not copies from the host's.
        known = [torch.full_like(bad, float(number)) for number in (stop, *next_counts)]
        sums = torch.stack([share.to(loss.device, torch.float64), bad, *known])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        return cls(sums, bad, depth)

    def read(self) -> Findings:
        """Return the verdict on the host; waits for the all-reduce, not for the optimizer."""
        square, bad_ranks, stops, *counts, bad, rejected, depth = self._numbers.read()
        norm = math.sqrt(square) if square >= 0 else math.nan
        return Findings(
            rejected > 0, norm, int(bad_ranks), stops > 0, not bad, tuple(counts), depth
        )
