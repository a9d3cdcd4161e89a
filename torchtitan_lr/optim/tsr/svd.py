# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Randomized SVD of gradients that are sharded over ranks and summed over replicas.

A gradient G (m, n) may be *sharded*: ranks hold blocks of its rows, of its columns, or both. And it
may be a *partial sum*: the true G is the sum over replicas. Ranks never send G or a matrix of its
size, only matrices of width k = r + p (TSR-Adam, Section 3.5).

Matrices of equal shape and layout are a `Batch`. All batches of a round are decomposed side by
side, so that an `Exchange` sums, or gathers, what all of them need in one message.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lr.compat.linalg import convergence_on_device
from torchtitan_lr.optim.tsr.sums import Axis, Exchange


class SVD(NamedTuple):
    """Leading singular triplets of a batch of b matrices."""

    U: Tensor
    """(b, m, r), orthonormal columns, sharded like G's rows."""
    S: Tensor
    """σ (b, r), in descending magnitude, equal on all ranks; negative where alignment with the
    earlier bases flipped only one side."""
    V: Tensor
    """(b, n, r), orthonormal columns, sharded like G's columns."""


@dataclass(frozen=True)
class Batch:
    """b gradients of one shape and layout."""

    gradients: Sequence[Tensor]
    """This rank's blocks of G, each (m, n); may be empty."""
    sketches: Tensor
    """Ω (b, n, k), the rows of the common random draw for this rank's columns."""
    rank: int
    """r ≤ k, the number of triplets."""
    block: tuple[int, int]
    """m and n of a rank's largest block."""
    partial: bool = False
    """Whether the gradients are partial sums over replicas."""
    earlier: tuple[Tensor | None, Tensor | None] = (None, None)
    """The previous bases U (b, m, r) and V (b, n, r), None for a side that is not to be aligned (in
    all batches). Zeros, or random, before the first refresh."""

    def times(self, factors: Tensor, transposed: bool = False) -> Tensor:
        """Return this rank's terms of G X (b, m, k), or of Gᵀ X (b, n, k)."""
        # One product per matrix: stacking the gradients would copy all of them.
        pairs = zip((g.mT if transposed else g for g in self.gradients), factors, strict=True)
        return torch.stack([g.to(x.dtype) @ x for g, x in pairs])


def randomized_svd(
    batches: Sequence[Batch], power_iterations: int, exchange: Exchange
) -> list[SVD]:
    """Compute the leading singular triplets of matrices (Algorithm 1's refresh).

    A gradient determines singular vectors up to a sign. The sketch fixes the sign, so that every
    layout of ranks computes the same vectors. Each vector is then flipped towards its predecessor,
    with its σ: kept moments (``tsr_moments = "keep"``) are indexed by vector, and those before and
    after a flip would cancel. The sides flip independently: if a gradient changes its sign, both
    bases stay and σ turns negative. Vectors that are nearly orthogonal to their predecessors, or
    have none, keep the sketch's sign. Columns of a vanishing singular value are set to zero: the
    gradient does not determine them, and rounding noise would differ between layouts.
    """
    heights, widths = zip(*(batch.block for batch in batches), strict=True)
    sketches = [batch.sketches for batch in batches]
    # Y = GΩ, a sketch of the range of G, and its basis Q.
    q, _ = tsqr(_products(batches, sketches, exchange), "rows", heights, exchange)  # (b, m, k)
    for _ in range(power_iterations):
        # Z = GᵀQ and Y = G·qr(Z): the sketch turns towards the leading directions.
        z = _products(batches, q, exchange, transposed=True)  # (b, n, k)
        z, _ = tsqr(z, "columns", widths, exchange)
        q, _ = tsqr(_products(batches, z, exchange), "rows", heights, exchange)
    # B = QᵀG (k, n), kept as Bᵀ = Q_b·R_b; then B = R_bᵀ·Q_bᵀ, and its SVD is that of a k×k matrix.
    b = _products(batches, q, exchange, transposed=True)  # (b, n, k)
    q_b, r_b = tsqr(b, "columns", widths, exchange)  # (b, n, k) and (b, k, k)
    factors = zip(q, q_b, r_b, (batch.rank for batch in batches), strict=True)
    found = [_triplets(*each) for each in factors]
    sides = [s[..., :1].mT @ svd.V for s, svd in zip(sketches, found, strict=True)]  # (b, 1, r)
    exchange.sum(sides, "columns")
    signed = [_signed(svd, side) for svd, side in zip(found, sides, strict=True)]
    return _aligned(signed, [batch.earlier for batch in batches], exchange)


def _products(
    batches: Sequence[Batch],
    factors: Sequence[Tensor],
    exchange: Exchange,
    transposed: bool = False,
) -> list[Tensor]:
    """Return ΣG X of all batches, or ΣGᵀ X, summed over the shards and the replicas."""
    pairs = zip(batches, factors, strict=True)
    terms = [batch.times(factor, transposed) for batch, factor in pairs]
    partial = [batch.partial for batch in batches]
    exchange.sum(terms, "rows" if transposed else "columns", partial)
    return terms


def _triplets(q: Tensor, q_b: Tensor, r_b: Tensor, rank: int) -> SVD:
    """Return triplets of Q·R_bᵀ·Q_bᵀ: the first r columns of U = QŨ and V = Q_b·Ṽ, and all k σ."""
    # A non-finite gradient makes R_b non-finite on every rank, where a decomposition may not end.
    # Its singular values become NaN instead, and so does the gradient's norm.
    small = _small_svd(torch.nan_to_num(r_b.mT, 0.0, 0.0, 0.0))
    values = small.S + (r_b * 0).sum(dim=(-2, -1))[:, None]  # (b, k)
    return SVD(q @ small.U[..., :rank], values, q_b @ small.V[..., :rank])


def _signed(svd: SVD, sides: Tensor) -> SVD:
    """Give vectors the sketch's sign, or zero if σ is below rounding error; keep r of k values."""
    left, values, right = svd
    smallest = values[:, :1] * values.shape[-1] * torch.finfo(values.dtype).eps
    values = values[:, : right.shape[-1]]
    keep = _signs(sides) * (values > smallest).to(values.dtype)[:, None, :]  # (b, 1, r)
    return SVD(left * keep, values, right * keep)


def _aligned(
    svds: Sequence[SVD],
    earlier: Sequence[tuple[Tensor | None, Tensor | None]],
    exchange: Exchange,
) -> list[SVD]:
    """Flip each vector, with its σ, towards its predecessor in the earlier bases."""
    found = list(svds)
    old_lefts, old_rights = zip(*earlier, strict=True)
    if old_lefts[0] is not None:
        turns = _turns([svd.U for svd in found], old_lefts, "rows", exchange)
        for i, (svd, turn) in enumerate(zip(found, turns, strict=True)):
            found[i] = svd._replace(U=svd.U * turn[:, None, :], S=svd.S * turn)
    if old_rights[0] is not None:
        turns = _turns([svd.V for svd in found], old_rights, "columns", exchange)
        for i, (svd, turn) in enumerate(zip(found, turns, strict=True)):
            found[i] = svd._replace(V=svd.V * turn[:, None, :], S=svd.S * turn)
    return found


def _turns(
    bases: Sequence[Tensor], old: Sequence[Tensor], axis: Axis, exchange: Exchange
) -> list[Tensor]:
    """Return 1 for each vector (b, r) that points to its predecessor's side, and -1 for others."""
    products = [(new * before).sum(dim=-2) for new, before in zip(bases, old, strict=True)]
    exchange.sum(products, axis)
    # Near zero the sign would be that of rounding noise, which layouts do not share.
    return [_signs(each + torch.finfo(each.dtype).eps ** 0.5) for each in products]


def _small_svd(square: Tensor) -> SVD:
    """Decompose a batch of matrices B (b, k, k); vectors of vanishing values are not unit.

    In fp32, BᵀB = V·diag(σ²)·Vᵀ is formed and decomposed in fp64, and U = BV/σ: one batched
    symmetric decomposition, where a GPU computes the SVDs of a batch one after the other. Squares
    lose half of fp64's digits, which leaves σ exact to 1e-7 where it is above rounding error. Wider
    dtypes have no such room, and take the SVD itself.

    The host does not ask whether the decomposition converged: σ is NaN where it did not.
    """
    with convergence_on_device(square.device) as failed:
        if square.dtype != torch.float32:
            left, values, right = torch.linalg.svd(square)
            right = right.mT
        else:
            wide = square.double()
            squares, right = torch.linalg.eigh(wide.mT @ wide)
            values, right = squares.clamp(min=0).sqrt().flip(-1), right.flip(-1)
            # A vanishing σ divides rounding noise: by no less than 1e-9 of the largest, or of no
            # matrix 0.
            least = (values[..., :1] * 1e-9).clamp(min=torch.finfo(torch.float64).tiny)
            left = wide @ right / torch.maximum(values, least)[..., None, :]
    for code in failed:
        values = values.masked_fill(code[:, None] != 0, torch.nan)
    return SVD(left.to(square.dtype), values.to(square.dtype), right.to(square.dtype))


def tsqr(
    talls: Sequence[Tensor], axis: Axis, most: Sequence[int], exchange: Exchange
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute QR factorizations of tall matrices whose rows, along an axis of G, ranks share.

    Ranks with k rows or more factorize their own, and gather only the triangles (k, k). Ranks with
    fewer rows gather the rows themselves. The QR factorization of what is gathered and stacked
    corrects the local Q, in one round per mesh dimension. The diagonal of R is made non-negative,
    so that both factors are unique (at full rank).

    Of this rank's rows (b, m, k), m may be less than k, or 0; ``most`` is a rank's largest m. Q
    (b, m, k) is sharded like them, and R (b, k, k) equal on all ranks.
    """
    found = [_factors(_padded(tall, rows)) for tall, rows in zip(talls, most, strict=True)]
    bases, triangles = [q for q, _ in found], [r for _, r in found]
    for mesh_dim in exchange.mesh_dims:
        for i, answer in enumerate(exchange.gather(triangles, axis, mesh_dim)):
            if answer is None:
                continue
            blocks, place = answer  # (ranks, b, h, k)
            height = blocks.shape[2]
            corrections, triangles[i] = _factors(blocks.transpose(0, 1).flatten(1, 2))
            # Of (b, ranks·h, k) this rank's rows.
            bases[i] = bases[i] @ corrections[:, place * height : (place + 1) * height]
    for i, (q, r) in enumerate(zip(bases, triangles, strict=True)):
        signs = _signs(r.diagonal(dim1=-2, dim2=-1))
        bases[i] = q[:, : talls[i].shape[1]] * signs[..., None, :]
        triangles[i] = r * signs[..., None]
    return bases, triangles


def _padded(tall: Tensor, most: int) -> Tensor:
    """Return a matrix (b, m, k) with as many rows as every rank sends."""
    rows, width = tall.shape[1:]
    lacking = min(most, width) - rows
    return torch.nn.functional.pad(tall, (0, 0, 0, lacking)) if lacking > 0 else tall


def _factors(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and R, k×k, of matrices (b, m, k); where m < k the identity and the matrices."""
    b, rows, width = tall.shape
    if rows >= width:
        return _qr(tall)
    return torch.eye(rows, dtype=tall.dtype, device=tall.device).expand(b, -1, -1), tall


def _qr(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Return the QR factorization of a batch of tall matrices, by the device's fastest exact way.

    A GPU computes Householder's factorizations of a batch one after the other, with few of its
    cores.
    """
    if tall.is_cuda and tall.dtype == torch.float32:
        return gram_qr(tall)
    q, r = torch.linalg.qr(tall)
    return q, r


def gram_qr(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Return the QR factorization of fp32 matrices by Cholesky's of their Gram matrices in fp64.

    The Gram matrix squares the condition number, and fp64 has the digits for that. A shift keeps it
    positive definite; a second pass removes what the shift did to the weakest directions. Those
    below fp32's rounding error vanish from Q. Q·R is the matrix itself, whatever its rank (shifted
    Cholesky QR, Fukaya et al., SIAM J. Sci. Comput. 42, 2020). Matrices are (b, m, k) with k ≤ m,
    and R (b, k, k) has a positive diagonal.
    """
    q, r = _shifted_cholesky_qr(tall.double())
    q, second = _shifted_cholesky_qr(q)
    return q.to(tall.dtype), (second @ r).to(tall.dtype)


def _shifted_cholesky_qr(tall: Tensor) -> tuple[Tensor, Tensor]:
    gram = tall.mT @ tall  # (b, k, k)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    limits = torch.finfo(tall.dtype)
    diagonal += limits.eps * tall.shape[-1] * diagonal.sum(-1, keepdim=True) + limits.tiny
    r = torch.linalg.cholesky_ex(gram, upper=True).L
    return torch.linalg.solve_triangular(r, tall, upper=True, left=False), r


def draw_sketches(keys: Iterable[tuple[str, int]], size: tuple[int, int], like: Tensor) -> Tensor:
    """Draw Ω (b, n, k) of ``size`` (n, k), standard normal, for several matrices on every rank.

    A parameter's name and the index of its refresh select the random stream.
    """
    generator = torch.Generator(like.device)
    drawn = []
    for name, index in keys:
        generator.manual_seed(_seed(f"{name}:{index}"))
        drawn.append(torch.randn(size, generator=generator, dtype=like.dtype, device=like.device))
    return torch.stack(drawn)


def draw_basis(key: str, size: tuple[int, int]) -> Tensor:
    """Draw an orthonormal basis that is the same in every bit on any machine and device.

    Rows are dealt to the columns in a random order and get a random sign. The columns do not
    overlap, so they are orthogonal without a factorization, and every row belongs to one. The key
    selects the random stream. The basis (m, r ≤ m) is fp64, on the CPU; each column has ⌊m/r⌋ or
    ⌈m/r⌉ entries of equal magnitude.
    """
    rows, rank = size
    generator = torch.Generator().manual_seed(_seed(key))
    columns = torch.randperm(rows, generator=generator).remainder(rank)
    signs = 1.0 - 2.0 * torch.randint(2, (rows,), generator=generator).to(torch.float64)
    counts = torch.bincount(columns, minlength=rank).to(torch.float64)
    basis = torch.zeros(size, dtype=torch.float64)
    basis[torch.arange(rows), columns] = signs / counts.sqrt()[columns]
    return basis


def _seed(key: str) -> int:
    # The 0 stands for a seed that a run could once set; another number would change every Ω.
    return int.from_bytes(hashlib.sha256(f"0:{key}".encode()).digest()[:7], "big")


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
