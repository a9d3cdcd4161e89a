# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Randomized SVD of gradients that are sharded over ranks and summed over replicas.

A gradient G (m, n) may be *sharded*: ranks hold blocks of its rows, of its columns, or both. And it
may be a *partial sum*: the true G is the sum over replicas. Ranks never send G or a matrix of its
size, only matrices of width k = r + p (TSR-Adam, Section 3.5).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.compat.dispatch import convergence_on_device
from torchtitan_lr.compat.process_groups import gathered
from torchtitan_lr.optim.tsr.sums import ProcessGroups, summed


@dataclass(frozen=True)
class Shards:
    """How ranks split matrices of one shape."""

    rows: tuple[dist.ProcessGroup, ...]  # the groups whose ranks split rows
    columns: tuple[dist.ProcessGroup, ...]  # the groups whose ranks split columns
    m: int  # the rows of a rank's largest block: all ranks must send alike
    n: int  # the columns of a rank's largest block


class SVD(NamedTuple):
    """Leading singular triplets of a batch of b matrices."""

    U: Tensor  # (b, m, r), orthonormal columns, sharded like G's rows
    S: Tensor
    """σ (b, r), in descending magnitude, equal on all ranks; negative where alignment with the
    earlier bases flipped only one side."""
    V: Tensor  # (b, n, r), orthonormal columns, sharded like G's columns


@dataclass(frozen=True)
class Batch:
    """b gradients of one shape that ranks split alike."""

    gradients: Sequence[Tensor]  # this rank's blocks of G, each (m, n); may be empty
    shards: Shards
    replicas: ProcessGroups | None = None
    """Has the group over which the gradients are partial sums; None if they are complete."""

    def times(self, X: Tensor, transposed: bool = False) -> Tensor:
        """Return ΣG X (b, m, k) of this rank's rows, or ΣGᵀ X (b, n, k) of its columns."""
        # One product per matrix: stacking the gradients would copy all of them.
        terms = []
        for G, x in zip(self.gradients, X, strict=True):
            terms.append((G.mT if transposed else G).to(x.dtype) @ x)
        total = summed(torch.stack(terms), self.shards.rows if transposed else self.shards.columns)
        if self.replicas is not None:
            self.replicas.sum_over_replicas([total])()
        return total


def randomized_svd(
    batch: Batch,
    sketches: Tensor,
    rank: int,
    power_iterations: int,
    earlier: tuple[Tensor | None, Tensor | None] = (None, None),
    sharing: Sequence[dist.ProcessGroup] = (),
) -> SVD:
    """Compute the leading r singular triplets of matrices (Algorithm 1's refresh).

    A gradient determines singular vectors up to a sign. The sketch fixes the sign, so that every
    layout of ranks computes the same vectors. Each vector is then flipped towards its predecessor,
    with its σ: kept moments (``tsr_moments = "keep"``) are indexed by vector, and those before and
    after a flip would cancel. The sides flip independently: if a gradient changes its sign, both
    bases stay and σ turns negative. Vectors that are nearly orthogonal to their predecessors, or
    have none, keep the sketch's sign. Columns of a vanishing singular value are set to zero: the
    gradient does not determine them, and rounding noise would differ between layouts.

    A side that has a predecessor is tested: if the products of its vectors with their sum are off
    by more than eps^¼, the side and σ are NaN. So is then the gradient's norm: the step is
    rejected, and its error names the matrix.

    ``sketches`` are Ω (b, n, k), the rows of the common random draw for this rank's columns.
    ``earlier`` are the previous bases U (b, m, r) and V (b, n, r), None for a side that is not to
    be aligned. They are zeros, or random, before the first refresh. ``sharing`` are groups of ranks
    that share the small decompositions, which all of them need.
    """
    shards = batch.shards
    # Y = GΩ, a sketch of the range of G, and its basis Q.
    Q, _ = tsqr(batch.times(sketches), shards.m, shards.rows)  # (b, m, k)
    for _ in range(power_iterations):
        # Z = GᵀQ and Y = G·qr(Z): the sketch turns towards the leading directions.
        Z, _ = tsqr(batch.times(Q, transposed=True), shards.n, shards.columns)  # (b, n, k)
        Q, _ = tsqr(batch.times(Z), shards.m, shards.rows)
    # B = QᵀG (k, n), kept as Bᵀ = Q_b·R_b; then B = R_bᵀ·Q_bᵀ, and its SVD is that of a k×k matrix.
    B = batch.times(Q, transposed=True)  # (b, n, k)
    Q_b, R_b = tsqr(B, shards.n, shards.columns)  # (b, n, k) and (b, k, k)
    # A non-finite gradient makes R_b non-finite on every rank, where a decomposition may not end.
    # Its singular values become NaN instead, and so does the gradient's norm.
    small = _shared_svd(torch.nan_to_num(R_b.mT, 0.0, 0.0, 0.0), sharing)
    S = small.S + (R_b * 0).sum(dim=(-2, -1))[:, None]  # (b, k)
    U, V = Q @ small.U[..., :rank], Q_b @ small.V[..., :rank]
    # The sketch's sign, or zero if σ is below rounding error.
    noise = S[:, :1] * S.shape[-1] * torch.finfo(S.dtype).eps
    S = S[:, :rank]
    sides = summed(sketches[..., :1].mT @ V, shards.columns)  # (b, 1, r)
    keep = _signs(sides) * (noise < S).to(S.dtype)[:, None, :]
    U, V = U * keep, V * keep
    # The predecessor's side, of U and of V.
    old_U, old_V = earlier
    if old_U is not None:
        turn = turns(U, old_U, keep, shards.rows)
        U, S = U * turn[:, None, :], S * turn
    if old_V is not None:
        turn = turns(V, old_V, keep, shards.columns)
        V, S = V * turn[:, None, :], S * turn
    return SVD(U, S, V)


def turns(basis: Tensor, old: Tensor, keep: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Return 1 for each vector (b, r) that points to its predecessor's side, and -1 for others.

    Vectors are NaN of a basis that is not orthonormal but for columns of zeros.
    """
    # XᵀX 1 is 1 for an orthonormal X: a rank's terms need no message of r².
    row_sums = basis.sum(dim=-1, keepdim=True)  # (b, m, 1)
    terms = torch.stack([(basis * old).sum(dim=-2), (basis * row_sums).sum(dim=-2)])
    products, ones = summed(terms, groups)  # (b, r)
    eps = torch.finfo(products.dtype).eps
    wrong = (ones - keep[:, 0].abs()).abs().amax(dim=-1, keepdim=True) > eps**0.25
    # Near zero the sign would be that of rounding noise, which layouts do not share.
    return _signs(products + eps**0.5).masked_fill(wrong, torch.nan)


def _shared_svd(squares: Tensor, groups: Sequence[dist.ProcessGroup]) -> SVD:
    """Decompose matrices (b, k, k) that all ranks of some groups have: each rank a part of them."""
    if not groups or len(squares) == 1:
        return _small_svd(squares)
    group, *others = groups
    count, k, _ = squares.shape
    size = -(-count // group.size())
    padded = torch.nn.functional.pad(squares, (0, 0, 0, 0, 0, size * group.size() - count))
    own = slice(group.rank() * size, (group.rank() + 1) * size)
    part = _shared_svd(padded[own], others)
    found = squares.new_zeros(len(padded), k, 2 * k + 1)
    found[own] = torch.cat([part.U, part.S[..., None], part.V], dim=-1)
    # Of the terms of a sum all but one are 0, so that nothing is rounded.
    U, S, V = summed(found[:count], [group]).split([k, 1, k], dim=-1)
    return SVD(U, S[..., 0], V)


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


def tsqr(tall: Tensor, most: int, groups: Iterable[dist.ProcessGroup]) -> tuple[Tensor, Tensor]:
    """Compute QR factorizations of tall matrices whose rows the ranks of some groups share.

    Ranks with k rows or more factorize their own, and gather only the triangles (k, k). Ranks with
    fewer rows gather the rows themselves. The QR factorization of what is gathered and stacked
    corrects the local Q, in one round per group. The diagonal of R is made non-negative, so that
    both factors are unique (at full rank).

    Of this rank's rows (b, m, k), m may be less than k, or 0; ``most`` is a rank's largest m. Q
    (b, m, k) is sharded like them, and R (b, k, k) equal on all ranks.
    """
    rows, width = tall.shape[1:]
    lacking = min(most, width) - rows  # every rank sends as many
    Q, R = _factors(torch.nn.functional.pad(tall, (0, 0, 0, lacking)) if lacking > 0 else tall)
    for group in groups:
        height = R.shape[1]
        stacked = gathered(R, group).transpose(0, 1).flatten(1, 2)  # (b, ranks·height, k)
        corrections, R = _factors(stacked)
        own = group.rank() * height
        Q = Q @ corrections[:, own : own + height]
    signs = _signs(R.diagonal(dim1=-2, dim2=-1))
    return Q[:, :rows] * signs[..., None, :], R * signs[..., None]


def _factors(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and R, k×k, of matrices (b, m, k); where m < k the identity and the matrices."""
    b, rows, width = tall.shape
    if rows < width:
        return torch.eye(rows, dtype=tall.dtype, device=tall.device).expand(b, -1, -1), tall
    if tall.is_cuda and tall.dtype == torch.float32:
        # A GPU computes Householder's factorizations one after the other, with few of its cores.
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
    # The prefix is a part of every Ω.
    return int.from_bytes(hashlib.sha256(f"0:{key}".encode()).digest()[:7], "big")


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
