# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam (the paper's Algorithm 1): `tsr_adam_step` is the step that training runs.

W and G are (m, n). Two orthonormal bases U (m, r) and V (n, r) span the gradient's leading
subspaces. Adam runs on the core C = UᵀGV (r, r), and its direction is lifted back. One-sided
projection (GaLore) omits V: the core is (r, n), for a matrix that is wider than tall. Tall and
square matrices are transposed first, because GaLore projects them on the right.

All functions work on this rank's parts. `MatrixStack` holds weights, bases and moments of matrices
of one shape and cuts each rank's slice; `Synchronizer` sums over ranks.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_lr.compat.products import tf32_products
from torchtitan_lr.optim.tsr.stack import MatrixStack, Refresh
from torchtitan_lr.optim.tsr.synchronize import Synchronizer


@dataclass(frozen=True)
class AdamHyperparameters:
    """Adam's constants in one step.

    Args:
        lr: η.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: ε.
        weight_decay: λ, decoupled.
        scale: α, the paper's scaling factor.
        rejected: True on the device if the step must leave no trace there, a scalar; None if the
            step is taken in any case.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    scale: float = 1.0
    rejected: Tensor | None = None


@dataclass(frozen=True)
class Synchronized:
    """The synchronized gradients of a step, before weights and state change.

    Args:
        norm: sqrt(Σ|C|² + Σ|g|²) of all cores and dense gradients, equal on all ranks.
        tensors: The cores and dense gradients; clipping scales them in place.
    """

    norm: Tensor
    tensors: list[Tensor]


Precision = Literal["float32", "tf32", "bfloat16"]
"""Values of ``tsr_product_precision``."""

TSRStep = Generator[Synchronized | None, Any, None]
"""A running step; see `tsr_adam_step`."""


def tsr_adam_step(
    stacks: Sequence[MatrixStack], synchronizer: Synchronizer, steps_done: int
) -> TSRStep:
    """Make one step of TSR-Adam (Algorithm 1) on all compressed matrices of a rank.

    The trainer runs backward, clipping and the schedule, so this generator pauses at each ``yield``
    until the trainer resumes it. Weights and state change only after the last ``yield``: an
    abandoned step has no effect.

    Args:
        stacks: The matrices, with their bases and moments.
        synchronizer: Sums over ranks.
        steps_done: Steps before this one.

    Yields:
        None before each micro-batch's backward: send whether it is the last micro-batch. None
        during backward: send the `Place` of a parameter whose gradient is there, or None at the
        end of the micro-batch. None once more when all sums have started. Then `Synchronized`: send
        the `AdamHyperparameters` of every stack.
    """
    due = synchronizer.due(steps_done)
    cores = synchronizer.begin(due)
    is_last = False
    while not is_last:
        is_last = yield None
        while (place := (yield None)) is not None:
            # C ← C + UᵀGV, then free G. A matrix that refreshes keeps its gradient until all
            # micro-batches are accumulated.
            synchronizer.receive(place)
            if synchronizer.is_projected(place):
                s, i = place
                stack: MatrixStack = stacks[s]
                precision = stack.settings.product_precision
                project(stack.take_gradient(i), *stack.bases(i), cores[s][i], precision)
            if is_last:
                synchronizer.ready(place)
    # C ← ΣC over the ranks.
    synchronizer.start_rest()
    yield None
    gradients = synchronizer.finish_sums()
    # Refresh: U, Σ, V ← rSVD(ΣG); then the core C = UᵀGV is Σ itself.
    refreshes = synchronizer.new_bases(due)
    norm = synchronizer.norm(due, refreshes, gradients)
    tensors = [synchronizer.all_cores, *(refresh.core for refresh in refreshes), *gradients]
    hyperparameters = yield Synchronized(norm, tensors)
    for refresh in refreshes:
        change_bases(stacks[refresh.stack], refresh, hyperparameters[refresh.stack].rejected)
        cores[refresh.stack][refresh.indices] = refresh.core
    # Run Adam on the core and lift its direction: W ← (1 − ηλ)W − ηα·UDVᵀ.
    for stack, core, hyper in zip(stacks, cores, hyperparameters, strict=True):
        update(stack, core, hyper)


def project(
    gradient: Tensor,
    left: Tensor,
    right: Tensor | None,
    out: Tensor,
    precision: Precision = "float32",
) -> None:
    """Accumulate a core, C ← C + UᵀGV. It is linear in G, so cores of parts add up.

    Args:
        gradient: G (m, n), in the dtype of the bases.
        left: U (m, r).
        right: V (n, r); None if that side is not projected.
        out: C (r, r), or (r, n) without V; changed in place.
        precision: Of the factors, see `multiply`.
    """
    half = multiply(left.mT, gradient, precision)
    if right is None:
        out.add_(half)
    elif precision == "float32":
        out.addmm_(half, right)
    else:
        out.add_(multiply(half, right, precision))


def update(stack: MatrixStack, core: Tensor, hyper: AdamHyperparameters) -> None:
    """Run Adam on the core and lift its direction: W ← (1 − ηλ)W − ηα·UDVᵀ.

    Args:
        stack: Weights, bases and moments of b matrices; changed in place.
        core: C (b, r, r), or (b, r, n) without V.
        hyper: Constants.
    """
    rejected = hyper.rejected
    if rejected is None:
        rejected = torch.zeros((), dtype=torch.bool, device=core.device)
    # m ← β₁m + (1 − β₁)C,  v ← β₂v + (1 − β₂)C∘C,  D = m̂ / (√v̂ + ε)
    average = stack.average.lerp(core, 1 - hyper.beta1)
    square = (stack.average_square * hyper.beta2).addcmul_(core, core, value=1 - hyper.beta2)
    torch.where(rejected, stack.average, average, out=stack.average)
    torch.where(rejected, stack.average_square, square, out=stack.average_square)
    stack.ages += 1
    directions = adam_direction(stack.average, stack.average_square, stack.age(), hyper)
    # A rejected step multiplies weights by 1 and adds 0, which changes no bit of them.
    directions = directions.masked_fill(rejected, 0.0)
    shrink = torch.full_like(rejected, 1 - hyper.lr * hyper.weight_decay, dtype=stack.dtype)
    shrink.masked_fill_(rejected, 1.0)
    weights = [stack.weight(i) for i in range(len(stack))]
    in_place = weights[0].dtype == stack.dtype
    if in_place and hyper.weight_decay:
        torch._foreach_mul_(weights, shrink)  # all in one launch
    for i, (weight, direction) in enumerate(zip(weights, directions, strict=True)):
        factor = 1.0 if in_place else shrink
        rate, precision = -hyper.lr * hyper.scale, stack.settings.product_precision
        lift(direction, *stack.bases(i), weight, factor, rate, precision)


def multiply(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """Multiply matrices whose entries are rounded first, with sums in fp32.

    Args:
        a: (m, k), in fp32 or wider.
        b: (k, n), of the same dtype.
        precision: ``float32`` rounds nothing, ``tf32`` to 11 significant bits (on CUDA; elsewhere
            torch rounds nothing), ``bfloat16`` to 8.

    Returns:
        Tensor (m, n) of the factors' dtype.
    """
    if precision == "tf32":
        with tf32_products():
            return a @ b
    if precision == "float32":
        return a @ b
    dtype, a, b = a.dtype, a.to(torch.bfloat16), b.to(torch.bfloat16)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
    # Products of bf16 numbers are exact in fp32. A bf16 product here would round its sums.
    return (a.float() @ b.float()).to(dtype)


def adam_direction(
    average: Tensor, average_square: Tensor, age: float | Tensor, hyper: AdamHyperparameters
) -> Tensor:
    """Compute D = m̂ / (√v̂ + ε) with Adam's bias correction.

    Args:
        average: m.
        average_square: v.
        age: Number t of cores in the moments; a broadcastable tensor if it differs by matrix.
        hyper: β₁, β₂ and ε.
    """
    corrected = average / (1 - hyper.beta1**age)
    return corrected / ((average_square / (1 - hyper.beta2**age)).sqrt() + hyper.eps)


def lift(
    direction: Tensor,
    left: Tensor,
    right: Tensor | None,
    weight: Tensor,
    shrink: float | Tensor,
    rate: float,
    precision: Precision = "float32",
) -> None:
    """Update a weight, W ← shrink·W + rate·UDVᵀ.

    Args:
        direction: D (r, r), or (r, n) without V.
        left: U (m, r).
        right: V (n, r); None if that side is not projected.
        weight: W (m, n), possibly of a narrower dtype; changed in place.
        shrink: Factor of W; a scalar tensor costs one more pass over W.
        rate: Factor of the lifted direction.
        precision: Of the product's factors, see `multiply`.
    """
    factors = (left, direction)
    if right is not None:
        factors = (multiply(left, direction, precision), right.mT)
    exact = weight.to(left.dtype)  # W itself if it has that dtype
    if isinstance(shrink, Tensor):
        exact.mul_(shrink)
        shrink = 1.0
    if precision == "float32":
        exact.addmm_(*factors, beta=shrink, alpha=rate)
    else:
        exact.mul_(shrink).add_(multiply(*factors, precision), alpha=rate)
    if exact is not weight:
        weight.copy_(exact)


def change_bases(stack: MatrixStack, refresh: Refresh, rejected: Tensor | None = None) -> None:
    """Replace the bases and carry the moments over according to ``tsr_moments``.

    ``keep`` leaves the moments unchanged (the published code; the new bases are sign-aligned with
    the old ones for this mode), ``rotate`` expresses them in the new bases (the paper's theory),
    and ``reset`` sets them to zero.

    Args:
        stack: The matrices; changed in place.
        refresh: New bases for some of them.
        rejected: True on the device to keep the old ones, a scalar; None for false. The counters,
            which are on the host, change in any case.
    """
    i = refresh.indices
    changes = [(stack.left, refresh.left)]
    if stack.right is not None and refresh.right is not None:
        changes.append((stack.right, refresh.right))
    if stack.settings.moments == "reset":
        zeros = torch.zeros_like(refresh.core)
        changes += [(stack.average, zeros), (stack.average_square, zeros)]
        stack.ages[i] = 0
    elif refresh.overlaps is not None:
        moments = rotate(stack.average[i], stack.average_square[i], *refresh.overlaps)
        changes += zip((stack.average, stack.average_square), moments, strict=True)
    for state, new in changes:
        state[i] = new if rejected is None else torch.where(rejected, state[i], new)
    stack.refreshes[i] += 1


def rotate(
    average: Tensor, average_square: Tensor, left: Tensor, right: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Re-express moments: m ← P·m·Qᵀ, and v by the squared entries of P and Q.

    The second moment holds variances of the core's entries. If the entries are independent, the
    variances of sums add with squared weights.

    Args:
        average: m.
        average_square: v.
        left: P = U₊ᵀU (r, r).
        right: Q = V₊ᵀV (r, r); None if that side is not projected.
    """
    average, average_square = left @ average, left.square() @ average_square
    if right is None:
        return average, average_square
    return average @ right.mT, average_square @ right.square().mT
