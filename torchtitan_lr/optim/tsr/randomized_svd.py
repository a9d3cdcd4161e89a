# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Randomized SVD of gradients that are split over ranks, in two ways at once.

A gradient G (m, n) may be *sharded*: ranks hold blocks of its rows, of its columns, or both. And it
may be a *partial sum*: the true G is the sum over replicas. Neither G nor any matrix of its size is
ever sent, only what is k = r + p wide (TSR-Adam, Section 3.5).

The algorithm is written once, as a generator. Where it needs other ranks it yields a request (a
`Sum` or a `Gather`) and receives the answer; the caller decides what that means. `solve_together`
answers for a mesh, and runs the generators of many matrices side by side, so that each round of
requests becomes one collective.
"""

import hashlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

Axis = Literal["rows", "columns"]


@dataclass(frozen=True)
class Sum:
    """Request: sum over the ranks that share an axis.

    Args:
        tensor: A contribution, in the same shape on all of these ranks; summed in place.
        axis: The axis whose shards are contracted away.
        replicas: Whether replicas too hold contributions to the same sum.
    """

    tensor: Tensor
    axis: Axis
    replicas: bool


@dataclass(frozen=True)
class Gather:
    """Request: the blocks of all ranks of one mesh dimension, where it shards the axis.

    The answer is ``(blocks (ranks, ...), own place)``, or None where it does not.

    Args:
        tensor: This rank's block.
        axis: The axis.
        mesh_dim: Index of the dimension, in the order that all matrices of a run share.
    """

    tensor: Tensor
    axis: Axis
    mesh_dim: int


Request = Sum | Gather
Answer = Tensor | tuple[Tensor, int] | None
Result = TypeVar("Result")
Steps = Generator[Request, Answer, Result]
"""A computation that asks other ranks for sums and blocks."""


class SVD(NamedTuple):
    """Leading singular triplets of a batch of b matrices.

    Attributes:
        left: U (b, m, r), orthonormal columns, sharded as the rows are.
        values: σ (b, r), of descending magnitude, equal on all ranks; negative where the signs of
            earlier bases turned one side and not the other.
        right: V (b, n, r), orthonormal columns, sharded as the columns are.
    """

    left: Tensor
    values: Tensor
    right: Tensor


@dataclass(frozen=True)
class SketchSettings:
    """How a batch is decomposed.

    Args:
        rank: r, the triplets wanted.
        width: k ≥ r, columns of the sketch.
        power_iterations: q.
        mesh_dims: How many mesh dimensions may shard a matrix of this run.
        replicas: Whether the gradients are partial sums over replicas.
    """

    rank: int
    width: int
    power_iterations: int
    mesh_dims: int = 0
    replicas: bool = False


def randomized_svd(
    gradients: Sequence[Tensor],
    sketches: Tensor,
    settings: SketchSettings,
    earlier: tuple[Tensor, Tensor | None] | None = None,
) -> Steps[SVD]:
    """Compute the leading singular triplets of equally shaped matrices (TSR-Adam, Algorithm 1).

    A gradient determines singular vectors up to a sign. The sketch chooses one, so that every
    layout of ranks finds the same vectors; bases that are replaced turn each vector towards their
    own (`_align`). Columns that belong to a vanishing singular value are zero: the gradient does
    not determine them, and whatever rounding put there would differ from layout to layout.

    Args:
        gradients: b local blocks of G, each (m, n); the rank's own, perhaps empty.
        sketches: Ω (b, n, k), the rows of the shared draw that belong to this rank's columns.
        settings: Rank, width and what is split.
        earlier: The bases that the result replaces, U (b, m, r) and V (b, n, r), or None where
            that side is not projected; zeros before the first.

    Yields:
        Requests; see the module.

    Returns:
        The triplets.
    """
    replicas, dims = settings.replicas, settings.mesh_dims
    # Y = GΩ, an (m, k) sketch of the range of G.
    y = yield from _sum(_times(gradients, sketches), "columns", replicas)
    q, _ = yield from tsqr(y, "rows", dims)
    for _ in range(settings.power_iterations):
        # Z = GᵀQ and Y = G·qr(Z): the sketch turns towards the leading directions.
        z = yield from _sum(_transposed_times(gradients, q), "rows", replicas)
        z, _ = yield from tsqr(z, "columns", dims)
        y = yield from _sum(_times(gradients, z), "columns", replicas)
        q, _ = yield from tsqr(y, "rows", dims)
    # B = QᵀG (k, n), kept as Bᵀ = Q_b·R_b; then B = R_bᵀ·Q_bᵀ, and its SVD is that of a k×k matrix.
    b = yield from _sum(_transposed_times(gradients, q), "rows", replicas)
    q_b, r_b = yield from tsqr(b, "columns", dims)
    # A gradient that is not finite leaves nothing finite here, on any rank. LAPACK would refuse it;
    # instead its singular values say so, and with them the gradient's norm.
    small_left, values, small_right = torch.linalg.svd(torch.nan_to_num(r_b.mT, 0.0, 0.0, 0.0))
    values = values + (r_b * 0).sum(dim=(-2, -1))[:, None]
    rank = settings.rank
    # U = QŨ and V = Ṽ, the first r columns.
    left = q @ small_left[..., :rank]
    right = q_b @ small_right.mT[..., :rank]
    sides = yield from _sum(sketches[..., :1].mT @ right, "columns", False)
    keep = _signs(sides) * _is_present(values, rank)[:, None, :]
    svd = SVD(left * keep, values[:, :rank], right * keep)
    if earlier is None:
        return svd
    return (yield from _align(svd, *earlier))


def _align(svd: SVD, earlier_left: Tensor, earlier_right: Tensor | None) -> Steps[SVD]:
    """Turn each vector towards the one that it replaces; U·diag(σ)·Vᵀ stays what it was.

    Moments that are kept belong to the vectors' numbers: where a vector changes its sign, so does
    what the core says, and averages of before and after cancel. The sides turn independently: a
    gradient that became its negative keeps both bases, and σ says so. Vectors that are nearly
    orthogonal to the earlier ones, or have none, keep the sketch's sign, which rounding does not
    touch.
    """
    turn = yield from _turns(svd.left, earlier_left, "rows")
    left, values, right = svd.left * turn[:, None, :], svd.values * turn, svd.right
    if earlier_right is not None:
        turn = yield from _turns(right, earlier_right, "columns")
        values, right = values * turn, right * turn[:, None, :]
    return SVD(left, values, right)


def _turns(vectors: Tensor, earlier: Tensor, axis: Axis) -> Steps[Tensor]:
    """Signs (b, r) of the products of each vector with the earlier one, 1 where they say little."""
    products = yield from _sum((vectors * earlier).sum(dim=-2), axis, False)
    return _signs(products + torch.finfo(products.dtype).eps ** 0.5)


def tsqr(tall: Tensor, axis: Axis, mesh_dims: int) -> Steps[tuple[Tensor, Tensor]]:
    """Factorise a tall matrix whose rows are spread over ranks, sending only k×k triangles.

    Each rank factorises its own block, the triangles are gathered and stacked, and their
    factorisation corrects the local Q; one round for every mesh dimension. The triangle's diagonal
    is made non-negative, which makes both factors unique (at full rank).

    Args:
        tall: This rank's rows (b, m, k); fewer than k, or none, on some ranks.
        axis: The axis of G that these rows belong to.
        mesh_dims: Number of mesh dimensions that may shard it.

    Yields:
        One `Gather` for each mesh dimension.

    Returns:
        Q (b, m, k), sharded as the input, and R (b, k, k), equal on all ranks.
    """
    rows, width = tall.shape[-2:]
    if rows < width:
        tall = torch.nn.functional.pad(tall, (0, 0, 0, width - rows))
    q, r = torch.linalg.qr(tall)
    for mesh_dim in range(mesh_dims):
        answer = yield Gather(r, axis, mesh_dim)
        if answer is None:
            continue
        assert isinstance(answer, tuple)
        blocks, place = answer
        stacked = blocks.transpose(0, 1).flatten(1, 2)  # (b, ranks·k, k)
        corrections, r = torch.linalg.qr(stacked)
        q = q @ corrections[:, place * width : (place + 1) * width]
    signs = _signs(r.diagonal(dim1=-2, dim2=-1))
    return q[..., :rows, :] * signs[..., None, :], r * signs[..., None]


def draw_sketches(
    keys: Iterable[tuple[str, int]], size: tuple[int, int], seed: int, like: Tensor
) -> Tensor:
    """Draw Ω for several matrices, the same on every rank.

    Args:
        keys: Parameter name and index of the refresh, which select the random stream.
        size: n and k.
        seed: Seed, together with the key.
        like: Gives device and dtype.

    Returns:
        Standard normal, (b, n, k).
    """
    return torch.stack([_draw(f"{seed}:{name}:{index}", size, like) for name, index in keys])


def _draw(key: str, size: tuple[int, int], like: Tensor) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(size, generator=generator, dtype=like.dtype, device=like.device)


def _sum(tensor: Tensor, axis: Axis, replicas: bool) -> Steps[Tensor]:
    answer = yield Sum(tensor, axis, replicas)
    assert isinstance(answer, Tensor)
    return answer


def _times(gradients: Sequence[Tensor], right: Tensor) -> Tensor:
    # One product a matrix: stacking the gradients would copy all of them.
    return torch.stack([g.to(x.dtype) @ x for g, x in zip(gradients, right, strict=True)])


def _transposed_times(gradients: Sequence[Tensor], left: Tensor) -> Tensor:
    return torch.stack([g.to(x.dtype).mT @ x for g, x in zip(gradients, left, strict=True)])


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)


def _is_present(values: Tensor, rank: int) -> Tensor:
    """Whether a singular value (b, k) is more than rounding; (b, r), 0 or 1."""
    smallest = values[:, :1] * values.shape[-1] * torch.finfo(values.dtype).eps
    return (values[:, :rank] > smallest).to(values.dtype)
