# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Randomized SVD of gradients that are sharded over ranks and summed over replicas.

A gradient G (m, n) may be *sharded*: ranks hold blocks of its rows, of its columns, or both. And it
may be a *partial sum*: the true G is the sum over replicas. Ranks never send G or a matrix of its
size, only matrices of width k = r + p (TSR-Adam, Section 3.5).

The algorithm is a generator. Where it needs other ranks, it yields a request (a `Sum` or a
`Gather`) and receives the answer. `sums.solve_together` runs the generators of many matrices side
by side and merges each round of requests into one collective.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lr.compat.linalg import convergence_on_device
from torchtitan_lr.optim.tsr.sums import Axis, Gather, Rounds, summed


class SVD(NamedTuple):
    """Leading singular triplets of a batch of b matrices.

    Attributes:
        U: (b, m, r), orthonormal columns, sharded like G's rows.
        S: σ (b, r), in descending magnitude, equal on all ranks; negative where alignment with the
            earlier bases flipped only one side.
        V: (b, n, r), orthonormal columns, sharded like G's columns.
    """

    U: Tensor
    S: Tensor
    V: Tensor


def randomized_svd(
    gradients: Sequence[Tensor],
    sketches: Tensor,
    rank: int,
    power_iterations: int,
    mesh_dims: int = 0,
    block: tuple[int, int] | None = None,
    replicas: bool = False,
    earlier: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Rounds[SVD]:
    """Compute the leading singular triplets of matrices of one shape (Algorithm 1's refresh).

    A gradient determines singular vectors up to a sign. The sketch fixes the sign, so that every
    layout of ranks computes the same vectors. Each vector is then flipped towards its predecessor,
    with its σ: kept moments (``tsr_moments = "keep"``) are indexed by vector, and those before and
    after a flip would cancel. The sides flip independently: if a gradient changes its sign, both
    bases stay and σ turns negative. Vectors that are nearly orthogonal to their predecessors, or
    have none, keep the sketch's sign. Columns of a vanishing singular value are set to zero: the
    gradient does not determine them, and rounding noise would differ between layouts.

    Args:
        gradients: This rank's b local blocks of G, each (m, n); may be empty.
        sketches: Ω (b, n, k), the rows of the common random draw for this rank's columns.
        rank: r ≤ k, the number of triplets.
        power_iterations: q.
        mesh_dims: Number of mesh dimensions that may shard a matrix of this run.
        block: m and n of a rank's largest block; by default those of this rank's.
        replicas: Whether the gradients are partial sums over replicas.
        earlier: The previous bases U (b, m, r) and V (b, n, r), None for a side that is not to be
            aligned. Zeros, or random, before the first refresh.
    """
    m, n = block or gradients[0].shape
    # Y = GΩ, a sketch of the range of G.
    y = yield from summed(_times(gradients, sketches), "columns", replicas)  # (b, m, k)
    q, _ = yield from tsqr(y, "rows", mesh_dims, m)  # (b, m, k)
    for _ in range(power_iterations):
        # Z = GᵀQ and Y = G·qr(Z): the sketch turns towards the leading directions.
        z = yield from summed(_times(gradients, q, transposed=True), "rows", replicas)  # (b, n, k)
        z, _ = yield from tsqr(z, "columns", mesh_dims, n)
        y = yield from summed(_times(gradients, z), "columns", replicas)
        q, _ = yield from tsqr(y, "rows", mesh_dims, m)
    # B = QᵀG (k, n), kept as Bᵀ = Q_b·R_b; then B = R_bᵀ·Q_bᵀ, and its SVD is that of a k×k matrix.
    b = yield from summed(_times(gradients, q, transposed=True), "rows", replicas)  # (b, n, k)
    q_b, r_b = yield from tsqr(b, "columns", mesh_dims, n)  # (b, n, k) and (b, k, k)
    # A non-finite gradient makes R_b non-finite on every rank, where a decomposition may not end.
    # Its singular values become NaN instead, and so does the gradient's norm.
    small = _small_svd(torch.nan_to_num(r_b.mT, 0.0, 0.0, 0.0))
    values = small.S + (r_b * 0).sum(dim=(-2, -1))[:, None]  # (b, k)
    # U = QŨ and V = Q_b·Ṽ, the first r columns.
    left = q @ small.U[..., :rank]  # (b, m, r)
    right = q_b @ small.V[..., :rank]  # (b, n, r)
    sides = yield from summed(sketches[..., :1].mT @ right, "columns", False)  # (b, 1, r)
    # 1 for singular values above rounding error, else 0.
    smallest = values[:, :1] * values.shape[-1] * torch.finfo(values.dtype).eps
    present = (values[:, :rank] > smallest).to(values.dtype)
    keep = _signs(sides) * present[:, None, :]
    left, right, values = left * keep, right * keep, values[:, :rank]
    return (yield from _aligned(SVD(left, values, right), *earlier))


def _aligned(svd: SVD, old_left: Tensor | None, old_right: Tensor | None) -> Rounds[SVD]:
    """Flip each vector, with its σ, towards its predecessor in the earlier bases."""
    left, values, right = svd
    if old_left is not None:
        turns = yield from _turns(left, old_left, "rows")
        left, values = left * turns[:, None, :], values * turns
    if old_right is not None:
        turns = yield from _turns(right, old_right, "columns")
        right, values = right * turns[:, None, :], values * turns
    return SVD(left, values, right)


def _turns(bases: Tensor, old: Tensor, axis: Axis) -> Rounds[Tensor]:
    """Return 1 for each vector (b, r) that points to its predecessor's side, and -1 for others."""
    products = yield from summed((bases * old).sum(dim=-2), axis, False)
    # Near zero the sign would be that of rounding noise, which layouts do not share.
    return _signs(products + torch.finfo(products.dtype).eps ** 0.5)


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


def tsqr(tall: Tensor, axis: Axis, mesh_dims: int, most: int) -> Rounds[tuple[Tensor, Tensor]]:
    """Compute the QR factorization of a tall matrix whose rows are shared out over ranks.

    Ranks with k rows or more factorize their own, and gather only the triangles (k, k). Ranks with
    fewer rows gather the rows themselves. The QR factorization of what is gathered and stacked
    corrects the local Q, in one round per mesh dimension. The diagonal of R is made non-negative,
    so that both factors are unique (at full rank).

    Args:
        tall: This rank's rows (b, m, k); m may be less than k, or 0, but not of all ranks together.
        axis: The axis of G that these rows belong to.
        mesh_dims: Number of mesh dimensions that may shard it.
        most: The largest m of a rank. Fewer rows are padded: all ranks must send alike.

    Returns:
        Q (b, m, k), sharded like the input, and R (b, k, k), equal on all ranks.
    """
    rows, width = tall.shape[1:]
    if (lacking := min(most, width) - rows) > 0:
        tall = torch.nn.functional.pad(tall, (0, 0, 0, lacking))
    q, r = _factors(tall)
    for mesh_dim in range(mesh_dims):
        answer = yield Gather(r, axis, mesh_dim)
        if answer is None:
            continue
        assert isinstance(answer, tuple)
        blocks, place = answer  # (ranks, b, h, k)
        height = blocks.shape[2]
        corrections, r = _factors(blocks.transpose(0, 1).flatten(1, 2))  # of (b, ranks·h, k)
        q = q @ corrections[:, place * height : (place + 1) * height]
    signs = _signs(r.diagonal(dim1=-2, dim2=-1))
    return q[:, :rows] * signs[..., None, :], r * signs[..., None]


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
    Cholesky QR, Fukaya et al., SIAM J. Sci. Comput. 42, 2020).

    Args:
        tall: Matrices (b, m, k), k ≤ m.

    Returns:
        Q (b, m, k) and R (b, k, k) with a positive diagonal.
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
    """Draw Ω for several matrices, the same on every rank.

    Args:
        keys: Parameter name and index of the refresh; they select the random stream.
        size: n and k.
        like: A tensor of the device and dtype to draw in.

    Returns:
        Standard normal, (b, n, k).
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
    selects the random stream.

    Returns:
        (m, r ≤ m) in fp64, on the CPU; each column has ⌊m/r⌋ or ⌈m/r⌉ entries of equal magnitude.
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


def _times(gradients: Sequence[Tensor], factors: Tensor, transposed: bool = False) -> Tensor:
    """Return the products G·X, or GᵀX, of b matrices (m, n) and factors (b, n or m, k)."""
    # One product per matrix: stacking the gradients would copy all of them.
    pairs = zip((g.mT if transposed else g for g in gradients), factors, strict=True)
    return torch.stack([g.to(x.dtype) @ x for g, x in pairs])


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
