# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The verdict on a step, between backward and the optimizer: all ranks accept it, or reject it.

It is one all-reduce, whose result stays on the device: the norm clips the gradients, ``rejected``
makes the optimizer leave the step out. The host reads a copy once the step is queued.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lr.agreement import first_rank_with, from_all_ranks
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.numerics import HostCopy
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.parallel.data_parallel import fsdp_modules, nonfinite, own_norms
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan.base import ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer


class NonFiniteError(RunFailedError):
    """A loss or gradient is NaN or infinite, and ``training.max_skipped_steps`` is used up."""


@dataclass(frozen=True)
class Findings:
    """What the host reads of a `Verdict`, equal on all ranks but for the loss's."""

    rejected: bool  # whether the optimizer left the step out
    norm: float  # of the full gradient; of replicas that train apart one at fault, or the largest
    bad_ranks: int  # number of ranks whose own loss is not finite
    stop: bool  # whether any rank received a stop signal
    next_counts: tuple[float, ...]  # the sums of the next data's counts over the ranks
    loss_is_finite: bool  # whether this rank's own loss is finite
    save: bool = False  # whether the first rank wants a checkpoint


@dataclass(frozen=True)
class Verdict:
    """The ranks' common decision on one step, on the device; `decide` makes it."""

    norm: Tensor  # of the full gradient (this replica's, if they train apart), an fp64 scalar
    rejected: Tensor  # 1 or 0, in fp32
    numbers: HostCopy
    replicas: int  # that train apart

    def read(self) -> Findings:
        """Return the verdict on the host; waits for the all-reduce, not for the optimizer."""
        numbers = self.numbers.read()
        squares, sums = numbers[: self.replicas], numbers[self.replicas :]
        bad_ranks, stops, saves, *counts, bad, rejected = sums
        norms = [math.sqrt(square) if square >= 0 else math.nan for square in squares]
        norm = next((norm for norm in norms if not math.isfinite(norm)), max(norms))
        decided = (rejected > 0, norm, int(bad_ranks), stops > 0, tuple(counts))
        return Findings(*decided, not bad, saves > 0)


def decide(
    loss: Tensor,
    share: Tensor,
    stop: bool,
    next_counts: Sequence[float],
    replica: int = 0,
    replicas: int = 1,
    save: bool = False,
) -> Verdict:
    """Accept or reject a step with all ranks, in one all-reduce.

    ``share`` is this rank's of the squared norm, ``next_counts`` are of the data read ahead. Each
    of ``replicas`` that train apart has a norm of its own.
    """
    bad = (~loss.isfinite()).double()
    # Fills of the device's memory, not copies from the host's.
    known = [torch.full_like(bad, float(number)) for number in (stop, save, *next_counts)]
    # Squared gradient norms by replica, ranks whose loss is not finite, signals to stop
    # and to save, and counts.
    squares = [torch.zeros_like(bad) for _ in range(replicas)]
    squares[replica] = share.to(loss.device, torch.float64)
    sums = torch.stack([*squares, bad, *known])  # (n,)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    norms, bad_ranks = sums[:replicas].sqrt(), sums[replicas]
    # A NaN of one rank is in the sums of all: every rank rejects the step. Second moments and
    # Gram matrices are in fp32, whose largest number is 3.4e38.
    overflows = (~norms.float().square().isfinite()).any()
    rejected = ((bad_ranks > 0) | overflows).float()
    own = torch.stack([bad, rejected.double()])
    return Verdict(norms[replica], rejected, HostCopy(torch.cat([sums, own])), replicas)


def step_unless(rejected: Tensor, optimizers: OptimizersContainer) -> None:
    """Step all optimizers, unless the step is rejected.

    The verdict is passed as torch's `GradScaler` does, in ``found_inf``. Fused Adam and optimizers
    with ``takes_verdict`` then change nothing without a read of the host. For torch's others, and
    weights that are offloaded, the host reads the verdict.
    """
    parts: list[Any] = list(optimizers)
    if not all(_reads_found_inf(part, rejected.device) for part in parts):
        if not rejected.item():
            optimizers.step()
        return
    for part in parts:
        part.found_inf = rejected
    try:
        optimizers.step()
    finally:
        for part in parts:
            del part.found_inf


def _reads_found_inf(optimizer: Any, device: torch.device) -> bool:
    """Return whether an optimizer reads ``found_inf`` on a device."""
    if getattr(optimizer, "takes_verdict", False):
        return True
    fused = all(group.get("fused", False) for group in optimizer.param_groups)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return fused and all(local_part(parameter).device == device for parameter in parameters)


class Origin:
    """Where a number that is not finite was made: a rejected step runs again, watched.

    A NaN reaches ranks that have not made it, but in later blocks than on the rank that has. Of a
    pipeline's stage the last block is looked at, and where ranks share rows every one.
    """

    def __init__(
        self, model_parts: Sequence[nn.Module], pipeline: Pipeline | None, dims: ParallelDims
    ) -> None:
        self._parts = {0: model_parts[0]} if pipeline is None else pipeline.parts  # by stage
        self._stages = 1 if pipeline is None else pipeline.stages  # of all ranks
        # Neighbours that share sums within a block, where a NaN of one is at once all of theirs.
        self._sharing = dims.cp * dims.tp
        self._blocks: list[tuple[int, nn.Module]] = []  # those that are looked at, by depth
        for part in model_parts if dims.cp_enabled or pipeline is not None else ():
            blocks = [(int(n), b) for n, b in part.get_submodule("layers").named_children()]
            self._blocks += blocks if dims.cp_enabled else blocks[-1:]

    def of(
        self, findings: Findings, gradients: StoredGradients, repeat: Callable[[], bool]
    ) -> tuple[str, int | None]:
        """Return why a step was rejected, and the rank; call it on every rank, before the next.

        ``repeat`` runs its passes again, and returns whether this rank's loss is finite then.
        """
        # The rejected step has changed no parameter: one that is not finite is the cause.
        parameters = trained_parameters(*self._parts.values()).items()
        broken = (name for name, p in parameters if not local_part(p).isfinite().all())
        if at := first_rank_with(next(broken, None)):
            return f"parameter {at[1]} of rank {at[0]} is not finite", at[0]
        if not findings.bad_ranks:
            where, rank = self._in_backward(gradients, repeat)
            return f"gradient norm is {findings.norm} ({where})", rank
        # Blocks come before the loss, and ranks where all is finite last.
        known = math.inf, findings.loss_is_finite
        depths = from_all_ranks(self._depth(repeat) if self._blocks or self._stages > 1 else known)
        first = min(depths)
        if first == (math.inf, True):
            return "a loss is not finite, but all were when the step was repeated", None
        what = "loss" if math.isinf(first[0]) else f"output of block {int(first[0])}"
        who, rank = self._named([rank for rank, depth in enumerate(depths) if depth == first])
        return f"{what} of {who} is not finite", rank

    def _depth(self, repeat: Callable[[], bool]) -> tuple[float, bool]:
        """Return the first block looked at with an output that is not finite, and if all is."""
        found = [math.inf]

        def note(depth: int, block: nn.Module, args: Any, output: Any) -> None:
            x = local_part(output[0] if isinstance(output, tuple) else output).detach()
            if not x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite():
                found.append(depth)

        handles = [b.register_forward_hook(partial(note, depth)) for depth, b in self._blocks]
        try:
            loss_is_finite = repeat()
        finally:
            for handle in handles:
                handle.remove()
        return min(found), loss_is_finite and len(found) == 1

    def _in_backward(
        self, gradients: StoredGradients, repeat: Callable[[], bool]
    ) -> tuple[str, int | None]:
        """Return whose backward made a gradient that is not finite, in words and as a rank.

        A NaN spreads against the order of the layers: the last that has one is nearest its origin.
        """
        sums = {stage: gradients.nonfinite(part) for stage, part in self._parts.items()}
        sources = [("", sums)]
        if dist.get_world_size() > 1 and fsdp_modules(self._parts.values()):  # a rank's own first
            with own_norms(self._parts.values()) as norms:
                repeat()
            own = {stage: nonfinite(norms, part) for stage, part in self._parts.items()}
            nobody = "only in the sum over the ranks, or not again when the step was repeated"
            sources = [("", own), (nobody, sums)]
        for nobody, of_stage in sources:
            for stage in reversed(range(self._stages)):
                names = of_stage.get(stage)
                found = from_all_ranks(names[-1] if names else None)
                if ranks := [rank for rank, name in enumerate(found) if name is not None]:
                    who, rank = (nobody, None) if nobody else self._named(ranks)
                    return f"{who}: {found[ranks[0]]}", rank
        return "every entry is finite, but the squares overflow", None

    def _named(self, ranks: Sequence[int]) -> tuple[str, int | None]:
        """Name the first of the ranks that saw it, or those of them that share its sums."""
        alike = [rank for rank in ranks if rank // self._sharing == ranks[0] // self._sharing]
        if len(alike) == 1:
            return f"rank {alike[0]}", alike[0]
        return f"one of the ranks {', '.join(map(str, alike))}", None
