# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam (the paper's Algorithm 1), as a torch optimizer in torchtitan's container.

W and G are (m, n). Two orthonormal bases U (m, r) and V (n, r) span the gradient's leading
subspaces. Adam runs on the core C = UᵀGV (r, r), and its direction is lifted back. One-sided
projection (GaLore) omits V: the core is (r, n), for a matrix that is wider than tall. Tall and
square matrices are transposed first, because GaLore projects them on the right.

`TSROptimizers` has the algorithm, in the order of a step; `MatrixStack` its equations, on this
rank's parts of b matrices of one shape.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from torchtitan_lr.agreement import from_all_ranks
from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part, own_part, shard_dims, wrap_like
from torchtitan_lr.numerics import scale_
from torchtitan_lr.optim.gradients import clip_factor, nonfinite_gradients
from torchtitan_lr.optim.selection import MatrixPlan, TSRSettings, plan_matrices
from torchtitan_lr.optim.tsr.communication import (
    DENSE,
    Layout,
    ParamRef,
    ReductionGroups,
    Refresh,
    Synchronizer,
    whole_gradient,
)
from torchtitan_lr.optim.tsr.randomized_svd import (
    SVD,
    Steps,
    draw_basis,
    draw_sketches,
    randomized_svd,
)
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.components import OptimizersContainer, init_optimizer_container


class TSROptimizers(OptimizersContainer):
    """TSR-Adam for all model parts of a rank, with one exchange for all their cores.

    The methods stand in the order of a step. The trainer calls `prepare` before and `accumulate`
    after each micro-batch, then `synchronize`, `clip` and `step`. Weights and state change only in
    `step`: a step that is abandoned before has no effect.

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
        groups = ReductionGroups.of(parameters, replicas, stages)
        own = {name: tuple(p.shape) for part in named for name, p in part}
        # A stage sees its own part, and the refreshes are spread over the whole model's.
        shapes = [own] if stages is None else from_all_ranks(own, stages)
        plans = plan_matrices(dict(chain(*(part.items() for part in shapes))), settings)
        sizes = {name: group.size() for name, group in groups.sharding.items()}
        self.optimizers = [TSRAdam(part, plans, sizes, settings, dict(defaults)) for part in named]
        stacks = [stack for optimizer in self.optimizers for stack in optimizer.stacks]
        dense = [p for optimizer in self.optimizers for p in optimizer.dense]
        refs: dict[Tensor, ParamRef] = {p: (DENSE, index) for index, p in enumerate(dense)}
        for number, stack in enumerate(stacks):
            refs |= {parameter: (number, i) for i, parameter in enumerate(stack.parameters)}
        # Backward runs from the last module to the first.
        backward = [refs[parameter] for parameter in reversed(parameters)]
        dims = [[shard_dims(p, dim, groups.sharding) for dim in range(p.dim())] for p in dense]
        split = [(p, tuple(chain(*of_p))) for p, of_p in zip(dense, dims, strict=True)]
        self.synchronizer = Synchronizer(stacks, split, groups, settings, backward)
        self.repair_drift = self.synchronizer.repair_drift
        # A hook that kept the optimizers alive would make a cycle, and torchtitan collects none.
        reference = weakref.ref(self)
        for parameter, ref in refs.items():
            parameter.register_post_accumulate_grad_hook(
                lambda _, ref=ref: (owner := reference()) and owner.gradient_arrived(ref)
            )
        self._counts_before: list[Tensor] = []
        self._forget_step()
        init_optimizer_container(self, parameters, defaults)
        logger.info("TSR-Adam compresses %d matrices of this rank", len(refs) - len(dense))
        if replicas is None and "fsdp" in groups.sharding:
            logger.info(
                "TSR-Adam without replicas: FSDP's reduce-scatter stays dense; only optimizer "
                "memory is saved. Set parallelism.data_parallel_replicate_degree to save "
                "communication"
            )

    def _forget_step(self) -> None:
        self.synchronizer.due = None
        self.in_microbatch = self._is_last = self._is_synchronized = False
        self._refreshes: list[Refresh] = []

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop all gradients, and the cores and bases of an abandoned step."""
        if self.synchronizer.due is not None:  # the bases of an abandoned step were never used
            self.synchronizer.drift.clear()
        self.repair_drift()
        self.synchronizer.sums.wait()  # which may still write to the gradients
        super().zero_grad(*args, **kwargs)
        self._forget_step()

    def begin(self) -> None:
        """Start a step: zero the cores, and plan its refreshes and sums."""
        self.synchronizer.begin(int(self.optimizers[0].steps))

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Use the gradients of a micro-batch as they arrive, see `Gradients`."""
        self.prepare(last)
        yield
        self.accumulate(last)

    @torch.no_grad()
    def prepare(self, last: bool) -> None:
        """Start a micro-batch: from now on backward's gradients are used as they arrive.

        Without a refresh in this step, only the core of a matrix is kept. FSDP2 calls the hooks
        after its reduce-scatter. Where no hook runs (a pipeline schedule that splits backward),
        `accumulate` finds the gradients.
        """
        # Once per step: what it depends on changes in `step` alone.
        if self.synchronizer.due is None:
            self.begin()
        self.in_microbatch, self._is_last = True, last

    @torch.no_grad()
    def gradient_arrived(self, ref: ParamRef) -> None:
        """Use a gradient that backward has produced in a micro-batch, if one is running.

        A matrix that keeps its bases is projected, C ← C + UᵀGV, and G is freed: the core is linear
        in G. A matrix that refreshes keeps its gradient until all micro-batches are accumulated,
        since Z and B need G after Q.

        Raises:
            RuntimeError: The sum that the gradient belongs to has already started.
        """
        if not self.in_microbatch:
            return
        sums, (number, index) = self.synchronizer.sums, ref
        parameter = self.synchronizer.parameter(ref)
        if parameter.grad is not None:
            if ref in sums.started:
                raise RuntimeError(
                    "a parameter received a second gradient after its sum over the replicas had "
                    "started; set optimizer.tsr_overlap_buckets = 1"
                )
            part = local_part(parameter.grad)
            if ref in self.synchronizer.projected:
                self.synchronizer.stacks[number].project(index)
            elif number == DENSE and part.untyped_storage().nbytes() > 2 * part.nbytes:
                # FSDP's gradients of one unit share their memory: a small one must not keep the
                # large ones alive.
                parameter.grad = parameter.grad.clone()
        if self._is_last:
            sums.ready(ref)

    @torch.no_grad()
    def accumulate(self, last: bool) -> None:
        """Finish a micro-batch: accumulate the gradients that no hook has seen.

        `prepare` need not have been called.
        """
        if not self.in_microbatch:
            self.prepare(last)
        for ref in self.synchronizer.order:
            is_left = self.synchronizer.parameter(ref).grad is not None
            if is_left and ref in self.synchronizer.projected:
                self.gradient_arrived(ref)
        self.in_microbatch = False
        if last:
            self.synchronizer.sums.ready(None)

    @torch.no_grad()
    def synchronize(self) -> Tensor:
        """Sum cores, dense gradients and sketches over the replicas.

        Returns:
            The norm sqrt(Σ|C|² + Σ|g|²) of cores and dense gradients, equal on all ranks.
        """
        # C ← ΣC over the ranks.
        self.synchronizer.sums.wait()
        # Refresh: U, Σ, V ← rSVD(ΣG); then the core C = UᵀGV is Σ itself.
        self._refreshes = self.synchronizer.new_bases()
        norm = self.synchronizer.norm(self._refreshes)
        for refresh in self._refreshes:
            _write(refresh.stack.core, refresh.indices, refresh.core)
        self._is_synchronized = True
        return norm

    def reduce(self) -> Tensor:
        """Synchronize, and return this rank's share of the squared norm."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return self.synchronize().square() / ranks

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale cores and dense gradients down to a norm, as `clip_grads_with_norm_` does.

        After the sums, and on what is used: each replica's own gradients would get another scale.
        """
        self.scale(clip_factor(max_norm, norm))

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply cores and dense gradients, which are linear in the loss, by a scalar."""
        assert self._is_synchronized
        dense = (whole_gradient(parameter) for parameter, _ in self.synchronizer.dense)
        scale_([self.synchronizer.all_cores, *dense], factor)

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update all parts; synchronize first if that has not been done.

        A part whose ``found_inf`` is 1 keeps its weights and moments; see `undo_step_counters`.
        """
        if not self._is_synchronized:
            self.accumulate(last=True)
            self.synchronize()
        self._counts_before = [count.clone() for part in self for count in part.counters]
        found_inf = self.optimizers[0].found_inf
        for refresh in self._refreshes:
            refresh.stack.change_bases(refresh, None if found_inf is None else found_inf > 0)
        for optimizer in self.optimizers:
            optimizer.is_synchronized = True
        super().step(*args, **kwargs)
        self._forget_step()

    @torch.no_grad()
    def undo_step_counters(self) -> None:
        """Reset the counters of the last step, which the device rejected."""
        counters = [count for part in self for count in part.counters]
        torch._foreach_copy_(counters, self._counts_before)

    def settle(self, rejected: bool) -> None:
        """Repair bases that differ between replicas; count no step that was rejected."""
        self.repair_drift()
        if rejected:
            self.undo_step_counters()

    def nonfinite(self, part: nn.Module) -> list[str]:
        """Return the names of a part's parameters whose gradient or core is not finite here."""
        stacks = self.optimizers[self.model_parts.index(part)].stacks
        cores = ((s.plans[i].name, core) for s in stacks for i, core in enumerate(s.core))
        spoilt = {name for name, core in cores if not torch.isfinite(core).all()}
        spoilt.update(nonfinite_gradients(part))
        names = (clean_name(name) for name, _ in part.named_parameters())
        return [name for name in names if name in spoilt]


class TSRAdam(Optimizer):
    """TSR-Adam of one model part, with AdamW for the dense parameters.

    `TSROptimizers` sums the gradients of all parts. All state is allocated in the constructor, in
    fp32 or wider, and never reallocated: a bf16 second moment at β₂ = 0.999 would never decay.

    Args:
        named_parameters: Clean name and parameter.
        plans: Of the compressed matrices, by name.
        sharding: Sizes of the run's mesh dimensions that split parameters, by name, in order.
        settings: The settings.
        defaults: ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay``.

    Attributes:
        stacks: The compressed matrices.
        dense: The other parameters.
        counters: The numbers of steps, refreshes and cores, on the host.
        is_synchronized: Whether the gradients are summed over all ranks, as `step` requires.
        found_inf: 1 if the next step must leave no trace, else 0; an fp32 scalar on the device.
            None if it is taken in any case. Set as torch's `GradScaler` sets it.
    """

    is_synchronized: bool = False
    found_inf: Tensor | None = None
    takes_verdict = True

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        plans: Mapping[str, MatrixPlan],
        sharding: Mapping[str, int],
        settings: TSRSettings,
        defaults: dict[str, Any],
    ) -> None:
        super().__init__([p for _, p in named_parameters], defaults)
        self.steps = torch.zeros((), dtype=torch.float32)
        self.dense = [p for name, p in named_parameters if name not in plans]
        parts = [local_part(p).detach() for p in self.dense]
        wide = [torch.promote_types(part.dtype, torch.float32) for part in parts]
        self._averages = [torch.zeros_like(p, dtype=t) for p, t in zip(parts, wide, strict=True)]
        self._squares = [average.clone() for average in self._averages]
        alike: dict[Any, list[tuple[MatrixPlan, Tensor]]] = defaultdict(list)
        for name, parameter in named_parameters:
            if name in plans:
                plan, part = plans[name], local_part(parameter)
                shape = (plan.rows, plan.columns, plan.rank, plan.power_iterations, plan.transposed)
                row, column = (1, 0) if plan.transposed else (0, 1)
                rows = shard_dims(parameter, row, sharding)
                layout = Layout(rows, shard_dims(parameter, column, sharding))
                alike[shape, layout, part.shape, part.dtype].append((plan, parameter))
        ranks = list(sharding.values())
        self.stacks = [
            MatrixStack([plan for plan, _ in same], [p for _, p in same], key[1], ranks, settings)
            for key, same in alike.items()
        ]
        self.counters = [self.steps]
        for stack in self.stacks:
            self.counters += [stack.ages, stack.refreshes]
            # What a checkpoint holds; the tensors share the stack's memory.
            for i, (plan, matrix) in enumerate(zip(stack.plans, stack.parameters, strict=True)):
                m, n, r, row, column = plan.rows, plan.columns, plan.rank, stack.row, stack.column
                core = ((r, r), {}) if plan.two_sided else ((r, n), {column: 1})
                self.state[matrix] = {
                    "step": self.steps,
                    "left": wrap_like(matrix, stack.left[i], (m, r), {row: 0}),
                    "exp_avg": wrap_like(matrix, stack.average[i], *core),
                    "exp_avg_sq": wrap_like(matrix, stack.average_square[i], *core),
                    "age": stack.ages[i],
                    "refreshes": stack.refreshes[i],
                }
                if stack.right is not None:
                    right = wrap_like(matrix, stack.right[i], (n, r), {column: 0})
                    self.state[matrix]["right"] = right
        moments = zip(self.dense, self._averages, self._squares, strict=True)
        for parameter, average, square in moments:
            like = (tuple(parameter.shape), {dim: dim for dim in range(parameter.dim())})
            self.state[parameter] = {
                "step": self.steps,
                "exp_avg": wrap_like(parameter, average, *like),
                "exp_avg_sq": wrap_like(parameter, square, *like),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters from gradients that `TSROptimizers` has summed over all ranks.

        Dense weights of a narrower dtype are updated in the moments' dtype, and rounded once.

        Raises:
            RuntimeError: The gradients are not summed: `TSROptimizers.step` sums and then steps.
        """
        # DCP's own call, which creates missing state, never comes: no state is missing.
        if not self.is_synchronized:
            raise RuntimeError(
                "TSRAdam.step() needs summed gradients: call the step() of its TSROptimizers"
            )
        self.is_synchronized = False
        self.steps += 1
        hyper = self.param_groups[0]
        for stack in self.stacks:
            stack.update(hyper, None if self.found_inf is None else self.found_inf > 0)
        if not self.dense:
            return
        # AdamW, W ← (1 − ηλ)W − η·m̂/(√v̂ + ε), by torch's fused kernel. It counts steps on the
        # device; `steps` counts them on the host.
        weights = [local_part(parameter) for parameter in self.dense]
        exact = [w.to(m.dtype) for w, m in zip(weights, self._averages, strict=True)]
        gradients = [
            local_part(cast(Tensor, p.grad)).to(m.dtype)
            for p, m in zip(self.dense, self._averages, strict=True)
        ]
        options: dict[str, Any] = {name: float(hyper[name]) for name in self.defaults}
        options |= {"fused": True, "found_inf": self.found_inf, "amsgrad": False, "maximize": False}
        ages = torch.full((len(exact),), float(self.steps) - 1, device=exact[0].device)
        adamw(exact, gradients, self._averages, self._squares, [], list(ages.unbind()), **options)
        for weight, wide in zip(weights, exact, strict=True):
            if weight is not wide:
                weight.copy_(wide)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the existing tensors; the hyperparameters stay the configured ones.

        Torch's own method would replace the tensors, and cast moments to a parameter's bf16.
        """
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(ids, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                local_part(self.state[parameter][name]).copy_(local_part(torch.as_tensor(value)))


class MatrixStack:
    """b matrices of equal shape, rank and layout, stacked to need fewer kernels.

    Args:
        plans: The compression of each matrix.
        parameters: The parameters, plain or DTensors.
        layout: The mesh dimensions that split each of them.
        ranks: Size of every mesh dimension of the run.
        settings: The settings.

    Attributes:
        row: Dimension of a parameter that its rows are, as it is projected.
        column: The other one.
        left: U (b, m, r), rows sharded like the matrix's rows.
        right: V (b, n, r), rows sharded like the matrix's columns; None if one-sided.
        average: m (b, r, r), or (b, r, n) sharded like the matrix's columns if one-sided.
        average_square: v, of the same shape as ``average``.
        core: C of the running step, of the same shape; a part of `Synchronizer.all_cores`.
        core_dims: Mesh dimensions that split a core.
        contracted: Mesh dimensions whose ranks each have one term of a core.
        sketch_size: Elements (m + n)k of one matrix's sketches on a rank.
        sends_dense: Whether a refresh sums dense gradients, not sketches, over the replicas.
        ages: Number of cores in the moments (b,), on the CPU.
        refreshes: Number of refreshes so far (b,), on the CPU.
    """

    core: Tensor

    def __init__(
        self,
        plans: Sequence[MatrixPlan],
        parameters: Sequence[Tensor],
        layout: Layout,
        ranks: Sequence[int],
        settings: TSRSettings,
    ) -> None:
        self.plans, self.parameters, self.settings = list(plans), list(parameters), settings
        self.plan = plan = plans[0]
        self.row, self.column = (1, 0) if self.plan.transposed else (0, 1)
        self.layout = layout
        # Blocks are counted with padding: all ranks must decide alike.
        split = ((plan.rows, layout.rows), (plan.columns, layout.columns))
        block = [reduce(lambda n, dim: -(-n // ranks[dim]), dims, size) for size, dims in split]
        self.sketch_size = sum(block) * plan.width
        self.sends_dense, _ = plan.sends(*block)
        self.core_dims = () if plan.two_sided else layout.columns
        self.contracted = {*layout.rows, *layout.columns}.difference(self.core_dims)
        b, r, weight = len(parameters), plan.rank, local_part(parameters[0])
        m, n = self._oriented(weight).shape
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": weight.device}
        self.left = torch.zeros(b, m, r, **kind)
        self.right = torch.zeros(b, n, r, **kind) if plan.two_sided else None
        self.average = torch.zeros(b, r, r if plan.two_sided else n, **kind)
        self.average_square = torch.zeros_like(self.average)
        self.ages = torch.zeros(b, dtype=torch.int64)
        self.refreshes = torch.zeros(b, dtype=torch.int64)
        if plan.waits:
            # The bases until the first refresh; each rank draws all rows, and keeps its own.
            sides = [("left", self.left, plan.rows, self.row)]
            if self.right is not None:
                sides.append(("right", self.right, plan.columns, self.column))
            for side, bases, rows, dim in sides:
                for own, parameter, basis in zip(plans, parameters, bases, strict=True):
                    full = draw_basis(f"{own.name}:{side}", (rows, plan.rank))
                    basis.copy_(own_part(parameter, full, {dim: 0}))

    def bases(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return U (b, m, r) and V (b, n, r) of some matrices."""
        return _read(self.left, indices), None if self.right is None else _read(self.right, indices)

    def project(self, index: int) -> None:
        """Accumulate a core, C ← C + UᵀGV, and free the gradient G (m, n)."""
        gradient = self._oriented(local_part(cast(Tensor, self.parameters[index].grad)))
        self.parameters[index].grad = None
        half = self.left[index].mT @ gradient.to(self.dtype)
        if self.right is None:
            self.core[index].add_(half)
        else:
            self.core[index].addmm_(half, self.right[index])

    def decompose(self, indices: Sequence[int], groups: ReductionGroups) -> Steps[SVD]:
        """Compute the leading singular triplets of some gradients; see `randomized_svd`."""
        parts = [self.parameters[i] for i in indices]
        gradients = [local_part(torch.zeros_like(p) if p.grad is None else p.grad) for p in parts]
        counts = self.refreshes.tolist()
        keys = [(self.plans[i].name, counts[i]) for i in indices]
        # Every rank draws the whole Ω (n, k) of each matrix, and keeps its own rows.
        full = draw_sketches(keys, (self.plan.columns, self.plan.width), self.left)
        own = [own_part(self.parameters[0], sketch, {self.column: 0}) for sketch in full]
        return randomized_svd(
            [self._oriented(gradient) for gradient in gradients],
            torch.stack(own),
            self.plan.rank,
            self.plan.power_iterations,
            mesh_dims=len(groups.sharding),
            replicas=groups.replicas is not None and not self.sends_dense,
            earlier=self.bases(indices),
        )

    def change_bases(self, refresh: Refresh, rejected: Tensor | None) -> None:
        """Replace the bases and carry the moments over according to ``tsr_moments``.

        ``keep`` leaves the moments unchanged (the published code; the new bases are sign-aligned
        with the old ones for this mode), and ``reset`` sets them to zero. ``rotate`` expresses them
        in the new bases (the paper's theory): with P = U₊ᵀU and Q = V₊ᵀV, m ← P·m·Qᵀ, and v by the
        squared entries of P and Q. The second moment holds variances of the core's entries; if
        these are independent, the variances of sums add with squared weights.

        Args:
            refresh: New bases for some matrices.
            rejected: True on the device to keep the old ones, a scalar; None for false. The
                counters, which are on the host, change in any case.
        """
        i = refresh.indices
        changes = [(self.left, refresh.left)]
        if self.right is not None and refresh.right is not None:
            changes.append((self.right, refresh.right))
        if self.settings.moments == "reset":
            zeros = torch.zeros_like(refresh.core)
            changes += [(self.average, zeros), (self.average_square, zeros)]
            self.ages[i] = 0
        elif refresh.overlaps is not None:
            p, q = refresh.overlaps
            average, square = p @ _read(self.average, i), p.square() @ _read(self.average_square, i)
            if q is not None:
                average, square = average @ q.mT, square @ q.square().mT
            changes += [(self.average, average), (self.average_square, square)]
        for state, new in changes:
            kept = new if rejected is None else torch.where(rejected, _read(state, i), new)
            _write(state, i, kept)
        self.refreshes[i] += 1

    def update(self, hyper: Mapping[str, Any], rejected: Tensor | None) -> None:
        """Run Adam on the core and lift its direction: W ← (1 − ηλ)W − ηα·UDVᵀ.

        Args:
            hyper: η (``lr``), β₁, β₂, ε (``eps``) and λ (``weight_decay``).
            rejected: True on the device to leave no trace there, a scalar; None for false.
        """
        lr, decay, beta1, beta2, eps = (
            float(hyper[name]) for name in ("lr", "weight_decay", "beta1", "beta2", "eps")
        )
        if rejected is None:
            rejected = torch.zeros((), dtype=torch.bool, device=self.core.device)
        # m ← β₁m + (1 − β₁)C,  v ← β₂v + (1 − β₂)C∘C
        average = self.average.lerp(self.core, 1 - beta1)
        square = (self.average_square * beta2).addcmul_(self.core, self.core, value=1 - beta2)
        torch.where(rejected, self.average, average, out=self.average)
        torch.where(rejected, self.average_square, square, out=self.average_square)
        # D = m̂ / (√v̂ + ε), where m̂ = m / (1 − β₁ᵗ) and t is the number of cores in the moments.
        self.ages += 1
        first, *others = ages = self.ages.tolist()
        age: float | Tensor = float(first)
        if any(other != first for other in others):
            # A copy from pageable memory would make the host wait for the device.
            on_host = torch.tensor(ages, dtype=self.dtype, pin_memory=self.left.is_cuda)
            age = on_host.to(self.left.device, non_blocking=True)[:, None, None]
        corrected = self.average / (1 - beta1**age)
        direction = corrected / ((self.average_square / (1 - beta2**age)).sqrt() + eps)
        # A rejected step multiplies weights by 1 and adds 0, which changes no bit of them.
        direction = direction.masked_fill(rejected, 0.0)
        shrink = torch.full_like(rejected, 1 - lr * decay, dtype=self.dtype)
        shrink.masked_fill_(rejected, 1.0)
        weights = [self._oriented(local_part(parameter)) for parameter in self.parameters]
        in_place = weights[0].dtype == self.dtype
        if in_place and decay:
            torch._foreach_mul_(weights, shrink)  # all in one launch
        rate = -lr * self.settings.scale
        for i, weight in enumerate(weights):
            factors = self.left[i], direction[i]
            if self.right is not None:
                factors = self.left[i] @ direction[i], self.right[i].mT
            if in_place:
                weight.addmm_(*factors, alpha=rate)
            else:
                # A narrower dtype would round the weight after each of the two operations.
                exact = weight.to(self.dtype).mul_(shrink)
                weight.copy_(exact.addmm_(*factors, alpha=rate))

    def _oriented(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.plan.transposed else matrix


def _read(stacked: Tensor, indices: Sequence[int]) -> Tensor:
    # A list as an index would be copied to the device, for which the host waits.
    return torch.stack([stacked[i] for i in indices])


def _write(stacked: Tensor, indices: Sequence[int], new: Tensor) -> None:
    torch._foreach_copy_([stacked[i] for i in indices], list(new.unbind()))
