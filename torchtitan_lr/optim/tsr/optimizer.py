# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam as a torch optimizer and a torchtitan container: state, checkpoints, schedule."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compat.names import clean_name
from torchtitan_lr.optim.finite import clip_factor, nonfinite_gradient
from torchtitan_lr.optim.tsr.adam import (
    AdamHyperparameters,
    Synchronized,
    TSRStep,
    tsr_adam_step,
)
from torchtitan_lr.optim.tsr.early_sums import DENSE, Place
from torchtitan_lr.optim.tsr.layout import derived, mesh_groups, shard_dims
from torchtitan_lr.optim.tsr.mesh_sync import ReductionGroups
from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings, plan_matrices
from torchtitan_lr.optim.tsr.stack import MatrixStack, build_stacks
from torchtitan_lr.optim.tsr.synchronize import Synchronizer
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.components import OptimizersContainer, init_optimizer_container


class TSRAdam(Optimizer):
    """TSR-Adam of one model part, with AdamW for the dense parameters.

    `TSROptimizers` sums all gradients and updates the compressed matrices of all parts together, in
    `tsr_adam_step`; `step` then updates the dense parameters of the part. All state is allocated in
    the constructor, in fp32 or wider, and never reallocated.

    Args:
        named_parameters: Clean name and parameter.
        plans: Of the compressed matrices, by name.
        order: Names of the run's mesh dimensions.
        settings: The settings.
        defaults: ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay``.

    Attributes:
        stacks: The compressed matrices.
        dense: The other parameters.
        synchronized: Whether the gradients are summed over all ranks, as `step` requires.
        found_inf: 1 if the next step must leave no trace, else 0; an fp32 scalar on the device.
            None if it is taken in any case. Set as torch's `GradScaler` sets it.
    """

    synchronized: bool = False
    found_inf: Tensor | None = None
    takes_verdict = True

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        plans: Mapping[str, MatrixPlan],
        order: Sequence[str],
        settings: TSRSettings,
        defaults: dict[str, Any],
    ) -> None:
        super().__init__([p for _, p in named_parameters], defaults)
        self.settings = settings
        self.steps = torch.zeros((), dtype=torch.float32)
        self.dense = [p for name, p in named_parameters if name not in plans]
        self.stacks = build_stacks(
            [(plans[name], p) for name, p in named_parameters if name in plans], order, settings
        )
        self._averages = [_moment(p) for p in self.dense]
        self._squares = [_moment(p) for p in self.dense]
        self._create_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the dense parameters, if their gradients are summed over all ranks.

        DCP calls ``step`` with zero gradients to create missing optimizer state. No state is
        missing here, so such a call does nothing.
        """
        if not self.synchronized:
            return
        self.synchronized = False
        self.steps += 1
        if self.dense:
            self._update_dense(self.hyperparameters())

    def hyperparameters(self) -> AdamHyperparameters:
        """Return the constants of the next step, set by the schedule."""
        group = self.param_groups[0]
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        numbers: dict[str, Any] = {name: float(group[name]) for name in names}
        rejected = None if self.found_inf is None else self.found_inf > 0
        return AdamHyperparameters(**numbers, scale=self.settings.scale, rejected=rejected)

    def counters(self) -> list[Tensor]:
        """Return the numbers of steps, refreshes and cores, which are on the host."""
        return [self.steps, *(n for stack in self.stacks for n in (stack.ages, stack.refreshes))]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the existing tensors.

        Torch's own method would replace the tensors, and cast moments to a parameter's bf16.
        """
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(ids, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                local_part(self.state[parameter][name]).copy_(local_part(torch.as_tensor(value)))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _create_state(self) -> None:
        for stack in self.stacks:
            for i, parameter in enumerate(stack.parameters):
                self.state[parameter] = {"step": self.steps, **stack.state_of(i)}
        for parameter, average, square in zip(
            self.dense, self._averages, self._squares, strict=True
        ):
            dims = {dim: dim for dim in range(parameter.dim())}
            size = tuple(parameter.shape)
            self.state[parameter] = {
                "step": self.steps,
                "exp_avg": derived(parameter, average, size, dims),
                "exp_avg_sq": derived(parameter, square, size, dims),
            }

    def _update_dense(self, hyper: AdamHyperparameters) -> None:
        """AdamW, W ← (1 − ηλ)W − η·m̂/(√v̂ + ε), by torch's fused kernel.

        It updates weights of a narrower dtype in the moments' dtype, and rounds them once.
        """
        weights = [local_part(parameter) for parameter in self.dense]
        exact = [w.to(m.dtype) for w, m in zip(weights, self._averages, strict=True)]
        gradients = [
            local_part(cast(Tensor, p.grad)).to(m.dtype)
            for p, m in zip(self.dense, self._averages, strict=True)
        ]
        # The kernel counts steps on the device; `steps` counts them on the host.
        ages = torch.full((len(exact),), float(self.steps) - 1, device=exact[0].device)
        adamw(
            exact,
            gradients,
            self._averages,
            self._squares,
            [],
            list(ages.unbind()),
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            lr=hyper.lr,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            maximize=False,
        )
        for weight, wide in zip(weights, exact, strict=True):
            if weight is not wide:
                weight.copy_(wide)


class TSROptimizers(OptimizersContainer):
    """TSR-Adam for all model parts of a rank, with one exchange for all their cores.

    The trainer calls `prepare` before and `accumulate` after each micro-batch, then `synchronize`,
    `clip` and `step`.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        settings: The settings.
        defaults: ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay``.
        replicas: Ranks with equal parameters and different data.
        stages: Pipeline ranks.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        settings: TSRSettings,
        defaults: dict[str, Any],
        replicas: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        self.model_parts = model_parts
        named = [
            [(clean_name(name), p) for name, p in part.named_parameters() if p.requires_grad]
            for part in model_parts
        ]
        parameters = [parameter for part in named for _, parameter in part]
        groups = mesh_groups(parameters)
        order = list(groups)
        plans = plan_matrices(_all_shapes(named, stages), settings)
        self.optimizers = [TSRAdam(part, plans, order, settings, dict(defaults)) for part in named]
        stacks = [stack for optimizer in self.optimizers for stack in optimizer.stacks]
        dense = [(p, _splits(p, order)) for optimizer in self.optimizers for p in optimizer.dense]
        reduction = ReductionGroups(groups, replicas, stages)
        places = _places(stacks, [parameter for parameter, _ in dense])
        # Backward runs from the last module to the first.
        backward = [places[parameter] for parameter in reversed(parameters)]
        self.synchronizer = Synchronizer(stacks, dense, reduction, settings, backward)
        self._step: TSRStep | None = None
        self._in_microbatch = False
        for parameter, place in places.items():
            parameter.register_post_accumulate_grad_hook(_hook(self, place))
        self._synchronized: Synchronized | None = None
        self._counts_before: list[Tensor] = []
        init_optimizer_container(self, parameters, defaults)
        _log_plan(stacks, reduction)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop all gradients, and the cores and bases of an abandoned step."""
        self.synchronizer.drop()
        super().zero_grad(*args, **kwargs)
        self._step = self._synchronized = None
        self._in_microbatch = False

    def reduce_over(self, replicas: dist.ProcessGroup) -> None:
        """Sum over another group from the next step on; its members may change between steps.

        Args:
            replicas: Ranks with equal parameters and different data.
        """
        groups = self.synchronizer.groups
        self.synchronizer.groups = ReductionGroups(groups.sharding, replicas, groups.stages)

    def abandon(self) -> None:
        """Drop a step whose sums have failed: weights and state stay as before it."""
        self.synchronizer.abandon()
        self.zero_grad()

    @torch.no_grad()
    def prepare(self, last: bool) -> None:
        """Start a micro-batch: from now on backward's gradients are used as they arrive.

        Without a refresh in this step, only the core of a matrix is kept. FSDP2 calls the hooks
        after its reduce-scatter. Where no hook runs (a pipeline schedule that splits backward),
        `accumulate` finds the gradients.
        """
        if self._step is None:
            stacks, steps_done = self.synchronizer.stacks, int(self.optimizers[0].steps)
            self._step = tsr_adam_step(stacks, self.synchronizer, steps_done)
            next(self._step)
        self._step.send(last)
        self._in_microbatch = True

    @torch.no_grad()
    def gradient_arrived(self, place: Place) -> None:
        """Project a gradient of backward and start sums; do nothing outside a micro-batch."""
        if self._in_microbatch:
            assert self._step is not None
            self._step.send(place)

    @torch.no_grad()
    def accumulate(self, last: bool) -> None:
        """Finish a micro-batch: accumulate the gradients that no hook has seen.

        Args:
            last: As given to `prepare`, which need not have been called.
        """
        if not self._in_microbatch:
            self.prepare(last)
        assert self._step is not None
        for place in self.synchronizer.order:
            if self.synchronizer.is_projected(place):
                self._step.send(place)
        self._in_microbatch = False
        self._step.send(None)

    @torch.no_grad()
    def synchronize(self) -> Tensor:
        """Sum cores, dense gradients and sketches over the replicas.

        Returns:
            The norm sqrt(Σ|C|² + Σ|g|²) of cores and dense gradients, equal on all ranks.
        """
        assert self._step is not None
        self._synchronized = next(self._step)
        assert self._synchronized is not None
        return self._synchronized.norm

    def share(self) -> Tensor:
        """Synchronize, and return this rank's share of the squared norm."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return self.synchronize().square() / ranks

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale cores and dense gradients down to a norm, as `clip_grads_with_norm_` does."""
        self.scale(clip_factor(max_norm, norm))

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply cores and dense gradients, which are linear in the loss, by a scalar."""
        assert self._synchronized is not None
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self._synchronized.tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, same in by_dtype.items():
            torch._foreach_mul_(same, factor.to(dtype))

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update all parts; call `synchronize` first if it has not run.

        A part whose ``found_inf`` is 1 keeps its weights and moments; see `take_back`.
        """
        if self._synchronized is None:
            self.accumulate(last=True)
            self.synchronize()
        assert self._step is not None
        self._counts_before = [count.clone() for part in self for count in part.counters()]
        of_stacks = [part.hyperparameters() for part in self.optimizers for _ in part.stacks]
        with suppress(StopIteration):  # the generator of the step ends here
            self._step.send(of_stacks)
        for optimizer in self.optimizers:
            optimizer.synchronized = True
        super().step(*args, **kwargs)
        self._step = self._synchronized = None

    @torch.no_grad()
    def take_back(self) -> None:
        """Reset the counters of the last step, which the device rejected."""
        counters = (count for part in self for count in part.counters())
        for count, before in zip(counters, self._counts_before, strict=True):
            count.copy_(before)

    def nonfinite(self) -> str | None:
        """Return the first parameter of this rank whose gradient or core is not finite, or None."""
        return nonfinite_gradient(self.model_parts) or self.synchronizer.nonfinite()


def _places(stacks: Sequence[MatrixStack], dense: Sequence[Tensor]) -> dict[Tensor, Place]:
    """Return the place of every parameter."""
    places = {parameter: (DENSE, index) for index, parameter in enumerate(dense)}
    for number, stack in enumerate(stacks):
        places |= {parameter: (number, i) for i, parameter in enumerate(stack.parameters)}
    return places


def _hook(optimizers: TSROptimizers, place: Place) -> Callable[[Tensor], None]:
    """Return a parameter's hook, which does not keep the optimizers alive."""
    reference = weakref.ref(optimizers)

    def hook(_: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner.gradient_arrived(place)

    return hook


def _moment(parameter: Tensor) -> Tensor:
    part = local_part(parameter)
    dtype = torch.promote_types(part.dtype, torch.float32)
    return torch.zeros_like(part, dtype=dtype, requires_grad=False)


def _splits(parameter: Tensor, order: Sequence[str]) -> tuple[int, ...]:
    return tuple(
        sorted({d for dim in range(parameter.dim()) for d in shard_dims(parameter, dim, order)})
    )


def _all_shapes(
    named: Sequence[Sequence[tuple[str, nn.Parameter]]], stages: dist.ProcessGroup | None
) -> dict[str, Sequence[int]]:
    """Return the shapes of the whole model's parameters, other pipeline stages included."""
    own = {name: tuple(p.shape) for part in named for name, p in part}
    if stages is None:
        return cast(dict[str, Sequence[int]], own)
    everyone: list[Any] = [None] * stages.size()
    dist.all_gather_object(everyone, own, group=stages)
    return {name: shape for shapes in everyone for name, shape in shapes.items()}


def _log_plan(stacks: Sequence[MatrixStack], groups: ReductionGroups) -> None:
    count = sum(len(stack) for stack in stacks)
    logger.info("TSR-Adam compresses %d matrices of this rank", count)
    if groups.replicas is None and "fsdp" in groups.sharding:
        logger.info(
            "TSR-Adam without replicas: FSDP's reduce-scatter stays dense; only optimizer memory "
            "is saved. Set parallelism.data_parallel_replicate_degree to save communication"
        )
