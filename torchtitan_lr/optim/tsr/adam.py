# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam on one device: the mathematics, without ranks, models or schedules.

W and G are (m, n). Two orthonormal bases U (m, r) and V (n, r) span where the gradient lives; Adam
runs on the core C = UᵀGV (r, r), and its direction is lifted back. One-sided projection (GaLore)
is the same without V, for a matrix that is not taller than wide: the core is (r, n). Matrices that
are, square ones included, are transposed: GaLore projects them on the right.

All functions take batches as well: equal matrices may be stacked in front.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torchtitan_lr.optim.tsr.randomized_svd import SVD, SketchSettings, randomized_svd, solve_alone

Moments = Literal["keep", "rotate", "reset"]


@dataclass(frozen=True)
class Bases:
    """Where a gradient is projected to.

    Args:
        left: U (m, r), or None for the identity.
        right: V (n, r), or None for the identity.
    """

    left: Tensor | None
    right: Tensor | None


@dataclass(frozen=True)
class State:
    """What TSR-Adam remembers of one matrix; fp32 at least.

    Args:
        bases: U and V.
        average: m, first moment of the core.
        average_square: v, second moment of the core.
        age: Number of cores in the moments.
    """

    bases: Bases
    average: Tensor
    average_square: Tensor
    age: int


@dataclass(frozen=True)
class Hyper:
    """Constants of a step.

    Args:
        lr: η.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: ε.
        weight_decay: λ, decoupled.
        scale: α, the paper's scaling factor.
        moments: What becomes of the moments when the bases change.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    scale: float = 1.0
    moments: Moments = "rotate"


def tsr_adam_step(
    weight: Tensor,
    gradient: Tensor,
    state: State,
    hyper: Hyper,
    sketch: Tensor | None = None,
    settings: SketchSettings | None = None,
) -> tuple[Tensor, State]:
    """Make one step of TSR-Adam (the paper's Algorithm 1, on the synchronised gradient).

    Args:
        weight: W (m, n).
        gradient: G (m, n).
        state: State before the step.
        hyper: Constants.
        sketch: Ω (n, k) on a refresh, None otherwise.
        settings: Rank and power iterations of the refresh.

    Returns:
        The new weight and the new state; nothing is changed in place.
    """
    if sketch is None:
        # C = UᵀGV
        core = project(gradient, state.bases)
    else:
        left, right = state.bases.left, state.bases.right
        assert settings is not None and left is not None
        # U, Σ, V ← rSVD(G), signs as before, and then C = UᵀGV is Σ itself.
        earlier = (left[None], None if right is None else right[None])
        svd = solve_alone(randomized_svd([gradient], sketch[None], settings, earlier))
        bases, core = new_bases(SVD(*(part[0] for part in svd)), right is not None)
        state = change_bases(state, bases, hyper.moments)
    # m ← β₁m + (1 − β₁)C,  v ← β₂v + (1 − β₂)C∘C,  D = m̂ / (√v̂ + ε)
    average = hyper.beta1 * state.average + (1 - hyper.beta1) * core
    square = hyper.beta2 * state.average_square + (1 - hyper.beta2) * core * core
    age = state.age + 1
    direction = adam_direction(average, square, age, hyper)
    # W ← W − ηα·UDVᵀ − ηλW
    update = lift(direction, state.bases)
    weight = weight - hyper.lr * (hyper.scale * update + hyper.weight_decay * weight)
    return weight, State(state.bases, average, square, age)


def project(gradient: Tensor, bases: Bases) -> Tensor:
    """Compute the core C = UᵀGV; linear in G, so cores of parts add up.

    Args:
        gradient: G (m, n).
        bases: U and V; None stands for the identity.
    """
    core = gradient if bases.left is None else bases.left.mT @ gradient
    return core if bases.right is None else core @ bases.right


def lift(direction: Tensor, bases: Bases) -> Tensor:
    """Compute U·D·Vᵀ, the direction (m, n) in the space of the weights."""
    lifted = direction if bases.left is None else bases.left @ direction
    return lifted if bases.right is None else lifted @ bases.right.mT


def adam_direction(
    average: Tensor, average_square: Tensor, age: float | Tensor, hyper: Hyper
) -> Tensor:
    """Compute D = m̂ / (√v̂ + ε) with Adam's bias correction.

    Args:
        average: m.
        average_square: v.
        age: Number t of cores in the moments; a tensor that broadcasts where matrices differ.
        hyper: β₁, β₂ and ε.
    """
    corrected = average / (1 - hyper.beta1**age)
    return corrected / ((average_square / (1 - hyper.beta2**age)).sqrt() + hyper.eps)


def new_bases(svd: SVD, two_sided: bool) -> tuple[Bases, Tensor]:
    """Take bases and core from a decomposition.

    Args:
        svd: U, σ, V of the gradient.
        two_sided: Whether both sides are projected; else U alone.

    Returns:
        The bases, and the core UᵀGV = diag(σ), or UᵀG = diag(σ)Vᵀ, which needs no communication.
    """
    if two_sided:
        return Bases(svd.left, svd.right), torch.diag_embed(svd.values)
    return Bases(svd.left, None), svd.values[..., None] * svd.right.mT


def change_bases(state: State, bases: Bases, moments: Moments) -> State:
    """Carry moments into new bases.

    Args:
        state: State with the old bases.
        bases: The new ones.
        moments: ``keep`` leaves the numbers as they are (the published code; the signs of the new
            bases are those of the old ones for its sake), ``rotate`` expresses them in the new
            bases (the paper's theory), ``reset`` forgets them.
    """
    if moments == "reset":
        nothing = torch.zeros_like(state.average)
        return State(bases, nothing, nothing.clone(), age=0)
    if moments == "rotate":
        assert bases.left is not None and state.bases.left is not None
        left = bases.left.mT @ state.bases.left
        right = None
        if bases.right is not None and state.bases.right is not None:
            right = bases.right.mT @ state.bases.right
        average, square = rotate(state.average, state.average_square, left, right)
        state = replace(state, average=average, average_square=square)
    return replace(state, bases=bases)


def rotate(
    average: Tensor, average_square: Tensor, left: Tensor, right: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Re-express moments: m ← P·m·Qᵀ, and v by the squared entries of P and Q.

    The second moment holds variances of the core's entries; treated as independent, variances of
    sums add with squared weights.

    Args:
        average: m.
        average_square: v.
        left: P = U₊ᵀU (r, r).
        right: Q = V₊ᵀV (r, r), None where that side is not projected.
    """
    average, average_square = left @ average, left.square() @ average_square
    if right is None:
        return average, average_square
    return average @ right.mT, average_square @ right.square().mT
