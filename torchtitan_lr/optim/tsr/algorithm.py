# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam, the paper's Algorithm 1, as a torch optimizer.

A weight W and its gradient G are (m, n). Two orthonormal bases, U (m, r) and V (n, r), span the
leading subspaces of G and are equal on all replicas. Each replica has the G of its own data. Only
the core C = UᵀGV (r, r) is summed over the replicas, and Adam's moments are those of the core.

| line of Algorithm 1 | where |
|---|---|
| every K steps: U, Σ, V ← randomized SVD of ΣG | `svd.randomized_svd` |
| moments of the old bases, carried over | `MatrixStack.refresh` |
| C ← UᵀGV | `MatrixStack.project` |
| C ← ΣC over the replicas | `TSRAdam._sum_cores` |
| m, v ← Adam's moments of C; D = m̂/(√v̂ + ε); W ← (1 − ηλ)W − ηα·UDVᵀ | `MatrixStack.update` |

A refresh belongs to its step: `TSRAdam.finish_sums` finds the new bases, `TSRAdam.update` starts to
use them. If that step is rejected (``found_inf``), the device keeps the old bases and moments. The
host counts a step once it knows the verdict, in `TSRAdam.settle` or in the next `TSRAdam.begin`. So
the step after a rejected one has the same number: the same matrices are due, with the same random
sketch and the new gradient. A run's step number, learning rate and data go on.

One-sided projection (GaLore) omits V: the core is UᵀG (r, n); see `MatrixPlan.transposed`.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lr.agreement import from_all_ranks
from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.numerics import scale_
from torchtitan_lr.optim.gradients import clip_factor, share_of_square, splits_of
from torchtitan_lr.optim.own_optimizer import OwnOptimizer, alike, split_buckets
from torchtitan_lr.optim.tsr.selection import BUCKET_ELEMENTS, TSRSettings, plan_matrices
from torchtitan_lr.optim.tsr.stack import (
    DenseParameters,
    MatrixStack,
    Refreshed,
    local_gradient,
    stack_alike,
    write,
)
from torchtitan_lr.optim.tsr.sums import Drift, EarlySums, ProcessGroups, Sum, sum_over


@dataclass
class StepState:
    """What belongs to one step alone, from `TSRAdam.begin` to `TSRAdam.step`."""

    due: dict[MatrixStack, list[int]]
    """The matrices that get new bases in this step, as places in their stack."""
    projected: dict[Tensor, None]
    """The other matrices, whose gradients are projected as they arrive, stack after stack: an
    ordered set, whose values are not used."""
    sums: EarlySums  # the sums of cores and dense gradients
    sums_start: bool = False  # whether a gradient that arrives is whole, and may start a sum
    refreshed: list[Refreshed] | None = None
    """None until `TSRAdam.finish_sums` has found the new bases."""


class TSRAdam(OwnOptimizer):
    """TSR-Adam; AdamW for vectors and other parameters that are not compressed.

    It works with any module, in one process or with a process group whose ranks have equal weights
    and different data:

    >>> model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
    >>> settings = TSRSettings(rank=4, refresh_interval=10)
    >>> optimizer = TSRAdam(model.named_parameters(), settings, lr=0.02)
    >>> model(torch.ones(1, 16)).square().sum().backward()
    >>> optimizer.step()

    With a ``group``, do not reduce the gradients (no DDP): `step` sums what it needs of them. So
    the loss of a rank is its part of the whole batch's: divide a mean by the number of ranks. Of
    DTensors, FSDP2's for example, it also finds the process groups that shard them.

    `step` needs no other call, with ``found_inf`` or without. A parameter without a gradient counts
    as one whose gradient is zero. A trainer that sums during backward and clips calls the methods
    of `optim.gradients.StoredGradients` in their order: the gradient of a matrix is then projected,
    and freed, as soon as backward has produced it.

    All state is in fp32 or wider: a bf16 second moment at β₂ = 0.999 would never decay.
    """

    def __init__(
        self,
        # As ``model.named_parameters()`` yields them, or torch's parameter groups of such:
        # ``[{"params": model.named_parameters(), "lr": 0.01}]``.
        named_parameters: Iterable[Any],
        settings: TSRSettings,
        *,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        group: dist.ProcessGroup | None = None,  # ranks with equal parameters and different data
        stages: dist.ProcessGroup | None = None,  # pipeline ranks, each with other parameters
        wire_dtype: torch.dtype | None = None,  # of sums over ``group``; None for the tensors' own
        # The trained parameters in the model's order, by default that of the parameter groups: sums
        # start while backward goes through it from its end.
        order: Sequence[Tensor] = (),
    ) -> None:
        defaults = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        super().__init__(named_parameters, defaults | {"weight_decay": weight_decay})
        self.settings = settings
        names = _trained_names(self.param_groups)
        wire = {"replicas": group, "stages": stages, "wire_dtype": wire_dtype}
        self.groups = ProcessGroups.of(names, **wire)
        self.steps = torch.zeros((), dtype=torch.float32)  # on the host
        self.stacks: list[MatrixStack] = []  # the compressed matrices
        # Parameter groups, and what `step` updates with their hyperparameters.
        self._updates: list[tuple[dict[str, Any], list[MatrixStack | DenseParameters]]] = []
        # Where each compressed matrix is, and the number of ranks that split each other parameter.
        self._compressed: dict[Tensor, tuple[MatrixStack, int]] = {}
        self._dense: dict[Tensor, int] = {}
        self._make_states(names)
        self._share_memory_of_cores(local_part(next(iter(names))))
        # Backward runs from the last module to the first.
        self._order = list(reversed(order or list(names)))
        self._running: StepState | None = None
        # A step that is not counted yet: the verdict on it, and its refreshes.
        self._uncounted: tuple[Tensor, list[tuple[MatrixStack, list[int]]]] | None = None
        self._drift = Drift(self.groups.replicas)
        self._watch_gradients()

    def _make_states(self, names: Mapping[Tensor, str]) -> None:
        """Plan and stack the matrices of each parameter group, and make the state of all."""
        shapes = {name: tuple(p.shape) for p, name in names.items()}
        if self.groups.stages is not None:  # refreshes are spread over the whole model's matrices
            for of_stage in from_all_ranks(dict(shapes), self.groups.stages):
                shapes |= of_stage
        plans = plan_matrices(shapes, self.settings)
        for param_group in self.param_groups:
            trained = [p for p in param_group["params"] if p in names]
            compressed = [(plans[names[p]], p) for p in trained if names[p] in plans]
            stacks = stack_alike(compressed, self.groups, self.settings)
            dense = DenseParameters([p for p in trained if names[p] not in plans])
            for stack in stacks:
                self._compressed |= {p: (stack, i) for i, p in enumerate(stack.parameters)}
            self._dense |= {p: splits_of(p) for p in dense.parameters}
            self.stacks += stacks
            updated: list[MatrixStack | DenseParameters] = [*stacks, dense]
            self._updates.append((param_group, updated))
            for each in updated:
                for index, parameter in enumerate(each.parameters):
                    # It shares the memory of the stacks.
                    self.state[parameter] = {"step": self.steps, **each.state(index)}

    def _share_memory_of_cores(self, weight: Tensor) -> None:
        """Make one buffer of all cores of a step, which one call clears, scales or sends."""
        # A pipeline stage may have no compressed matrix.
        like = self.stacks[0].exp_avg if self.stacks else weight
        sizes = [stack.exp_avg.numel() for stack in self.stacks]
        self._cores = like.new_zeros(sum(sizes))
        for stack, part in zip(self.stacks, self._cores.split(sizes), strict=True):
            stack.C = part.view(stack.exp_avg.shape)

    def _watch_gradients(self) -> None:
        """Let backward call `gradient_arrived` for each parameter."""
        # A hook that kept the optimizer alive would make a cycle, and torchtitan collects none.
        reference = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            if (optimizer := reference()) is not None:
                optimizer.gradient_arrived(parameter)

        for parameter in self._order:
            parameter.register_post_accumulate_grad_hook(arrived)

    # The order of a step: begin, backward (gradients arrive), finish_sums, clip, step, settle.

    @torch.no_grad()
    def begin(self) -> None:
        """Zero the cores, and plan the refreshes and sums of the next step."""
        self._drift.repair()
        self._count()
        self._cores.zero_()
        due = {stack: stack.due(int(self.steps)) for stack in self.stacks}
        projected: dict[Tensor, None] = {}
        # Of these the gradient itself is summed.
        whole = [parameter for parameter in self._order if parameter in self._dense]
        for stack, indices in due.items():
            for index, parameter in enumerate(stack.parameters):
                if index not in indices:
                    projected[parameter] = None
                elif stack.sends_dense:
                    whole.append(parameter)
        self._running = StepState(due, projected, self._plan_sums(projected, whole))

    @property
    def usual(self) -> bool:
        """Whether no matrix of the running step is due, so that its passes project all of them."""
        return self._running is not None and not any(self._running.due.values())

    def _plan_sums(self, projected: Container[Tensor], whole: Iterable[Tensor]) -> EarlySums:
        """Divide a step's sums, of cores and of whole gradients, into messages."""
        count = self.settings.overlap_buckets
        parameters = [parameter for parameter in self._order if parameter in projected]
        sizes = [self._core(parameter).numel() for parameter in parameters]
        sums = []
        for bucket in split_buckets(parameters, sizes, -(-sum(sizes) // count)):
            sums.append(Sum(bucket, partial(self._sum_cores, bucket)))
        for same in alike(whole, lambda parameter: parameter.dtype):  # one message has one dtype
            sizes = [local_part(parameter).numel() for parameter in same]
            most = min(-(-sum(sizes) // count), BUCKET_ELEMENTS)
            for bucket in split_buckets(same, sizes, most):
                sums.append(Sum(bucket, partial(self._sum_gradients, bucket)))
        return EarlySums(sums, self._order)

    def _sum_cores(self, parameters: Sequence[Tensor]) -> Callable[[], None]:
        """C ← ΣC: sum over the shards, then start the sum over the replicas."""
        cores = [self._core(parameter) for parameter in parameters]
        # All cores of a rank are one buffer, which is sent without a copy.
        sent = [self._cores] if len(parameters) == len(self._compressed) else cores
        for group in self.groups.sharding.values():
            # Along a one-sided core's long side ranks hold different blocks: nothing to add.
            contracted = [group in self._compressed[p][0].contracted for p in parameters]
            terms = list(compress(cores, contracted))
            sum_over(sent if all(contracted) else terms, group)()
        return self.groups.sum_over_replicas(sent)

    def _sum_gradients(self, parameters: Sequence[Tensor]) -> Callable[[], None]:
        """G ← ΣG: start the sum over the replicas."""
        return self.groups.sum_over_replicas([local_gradient(p) for p in parameters])

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Surround forward and backward of a micro-batch; ``last`` is the step's last one.

        FSDP2 calls the hooks after its reduce-scatter. Where no hook runs (a pipeline schedule that
        splits backward), the end of the micro-batch finds the gradients.
        """
        step = self._running
        assert step is not None
        # A pipeline runs backward several times before a gradient is complete.
        early = self.groups.stages is None and self.settings.overlap_buckets > 1
        step.sums_start = last and early
        yield
        with torch.no_grad():
            for parameter in self._order:
                if parameter.grad is not None and parameter in step.projected:
                    self.gradient_arrived(parameter)
            if last:
                step.sums.start_all()

    @torch.no_grad()
    def gradient_arrived(self, parameter: Tensor) -> None:
        """Use a gradient that backward has produced, if a step is running.

        A matrix that keeps its bases is projected, and its gradient is freed: the core is linear in
        G. A matrix that is due keeps its gradient until all micro-batches are accumulated, since Z
        and B need G after Q.
        """
        step = self._running
        if step is None:
            return
        if parameter.grad is not None:
            if parameter in step.sums.started:
                raise RuntimeError(
                    "a parameter received a second gradient after its sum over the replicas had "
                    "started; set optimizer.tsr_overlap_buckets = 1"
                )
            part = local_part(parameter.grad)
            if parameter in step.projected:
                stack, index = self._compressed[parameter]
                stack.project(index)
            elif (
                parameter not in self._compressed
                and part.untyped_storage().nbytes() > 2 * part.nbytes
            ):
                # FSDP's gradients of one unit share their memory: a small one must not keep the
                # large ones alive.
                parameter.grad = parameter.grad.clone()
        if step.sums_start:
            step.sums.ready(parameter)

    def _core(self, parameter: Tensor) -> Tensor:
        stack, index = self._compressed[parameter]
        return stack.C[index]

    @torch.no_grad()
    def finish_sums(self) -> Tensor:
        """Wait for the sums over the replicas, and find the new bases of matrices that are due.

        Return this rank's share of Σ|C|² + Σ|G|² of cores and dense gradients, an fp64 scalar.
        """
        step = self._running
        assert step is not None
        step.sums.wait()
        step.refreshed = []
        for stack, due in step.due.items():
            # What a refresh holds and gathers at a time fits into one bucket.
            for bucket in split_buckets(due, [stack.held] * len(due), BUCKET_ELEMENTS):
                step.refreshed.append(stack.refresh(bucket, self._drift))
        share = self._share_of_square(step.projected, step.refreshed)
        for new in step.refreshed:
            write(new.stack.C, new.indices, new.C)
        return share

    def _share_of_square(
        self, projected: Iterable[Tensor], refreshed: Sequence[Refreshed]
    ) -> Tensor:
        """Return this rank's share of the squared norm; see `share_of_square`."""
        if not refreshed and all(stack.core_ranks == 1 for stack in self.stacks):
            pieces = [(self._cores, 1)]  # in most steps: all cores are one piece
        else:
            pieces = [(self._core(p), self._compressed[p][0].core_ranks) for p in projected]
        pieces += [(new.C, new.stack.core_ranks) for new in refreshed]
        pieces += [(local_gradient(parameter), ranks) for parameter, ranks in self._dense.items()]
        stages = 1 if self.groups.stages is None else self.groups.stages.size()
        return share_of_square(pieces, stages)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale cores and dense gradients down to a norm, as `clip_grads_with_norm_` does.

        After the sums, and on what is used: each replica's own gradients would get another scale.
        """
        gradients = [local_gradient(parameter) for parameter in self._dense]
        scale_([self._cores, *gradients], clip_factor(max_norm, norm))

    def update(self, rejected: Tensor) -> None:
        """Update all parameters, unless the step is rejected.

        If `begin` was not called, all gradients are used from where backward has left them.
        """
        if self._running is None:
            self.begin()
            with self.micro_batch(last=True):
                pass
        assert self._running is not None
        if self._running.refreshed is None:
            self.finish_sums()
        refreshed = self._running.refreshed or []
        for new in refreshed:
            new.accept(rejected)
        steps = float(self.steps) + 1
        for param_group, updated in self._updates:
            for each in updated:
                each.update(steps, param_group, rejected)
        self._uncounted = rejected, [(new.stack, new.indices) for new in refreshed]
        if self.found_inf is None:
            self._count(rejected=False)
        self._running = None

    @torch.no_grad()
    def settle(self, rejected: bool) -> None:
        """Finish a step whose verdict the host has read: count it, unless it was rejected.

        Without this call the next `begin` does so, and then the host waits for ``found_inf``.
        """
        self._drift.repair(used=not rejected)
        self._count(rejected)
        self._running = None  # without a `step`, of passes that were only repeated

    def _count(self, rejected: bool | None = None) -> None:
        """Count the last step and its refreshes, unless it was rejected."""
        if self._uncounted is None:
            return
        (verdict, refreshes), self._uncounted = self._uncounted, None
        if verdict if rejected is None else rejected:  # of a tensor the host waits for the value
            return
        self.steps += 1
        for stack, indices in refreshes:
            stack.refresh_counts[indices] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary of the state and hyperparameters; no rejected step counts."""
        self._count()
        return super().state_dict()

    def nonfinite(self, part: nn.Module) -> list[str]:
        """Return the names of a part's parameters whose gradient or core is not finite here."""
        names = []
        for name, parameter in part.named_parameters():
            used = [] if parameter.grad is None else [local_part(parameter.grad)]
            if parameter in self._compressed:
                used.append(self._core(parameter))
            if not all(torch.isfinite(tensor).all() for tensor in used):
                names.append(clean_name(name))
        return names

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the existing tensors; the hyperparameters stay the configured ones."""
        self._uncounted = None  # a step that is not in the loaded counts
        super().load_state_dict(state_dict)


def _trained_names(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Return the names of the parameters that are trained, in the order of the parameter groups."""
    names: dict[Tensor, str] = {}
    for group in groups:
        if "param_names" not in group:
            raise ValueError("TSRAdam needs names: give it model.named_parameters()")
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.requires_grad:
                names[parameter] = name
    return names
