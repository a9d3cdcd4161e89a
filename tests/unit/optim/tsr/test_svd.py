# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest
import torch

from torchtitan_lr.optim.tsr import svd
from torchtitan_lr.optim.tsr.svd import (
    Batch,
    Shards,
    draw_basis,
    draw_sketches,
    gram_qr,
    randomized_svd,
)

F64 = torch.float64


def draw(*size, seed=0):
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def decaying(m, n, seed=0, ratio=0.3):
    u, v = (torch.linalg.qr(draw(k, min(m, n), seed=seed + k))[0] for k in (m, n))
    return (u * ratio ** torch.arange(min(m, n), dtype=F64)) @ v.T


def solve_with(gradients, omega, rank, q=1, earlier=(None, None)):
    """Nothing is sharded, and every sum is complete."""
    batch = Batch(gradients, Shards((), (), *gradients[0].shape))
    return randomized_svd(batch, omega, rank, q, earlier)


def solve(gradients, rank, width, q=1, seed=0, earlier=(None, None)):
    omega = draw(len(gradients), gradients[0].shape[1], width, seed=seed)
    return solve_with(gradients, omega, rank, q, earlier)


@pytest.mark.parametrize("size", [(20, 12), (12, 20), (9, 9)])
def test_exact_where_the_sketch_is_as_wide_as_the_matrix(size):
    gradients = [draw(*size, seed=s) for s in range(3)]
    svd = solve(gradients, rank=4, width=min(size))
    for i, g in enumerate(gradients):
        u, s, vt = torch.linalg.svd(g, full_matrices=False)
        torch.testing.assert_close(svd.S[i], s[:4])
        best = (u[:, :4] * s[:4]) @ vt[:4]
        torch.testing.assert_close((svd.U[i] * svd.S[i]) @ svd.V[i].T, best)


@pytest.mark.parametrize("ratio", [0.9, 0.55, 0.2])
def test_fp32_is_as_exact_as_its_own_svd(ratio):
    """Singular values fall to 0.9^15, to 1e-4 and below rounding."""
    gradients = [decaying(40, 16, ratio=ratio, seed=seed) for seed in range(3)]
    omega = draw(3, 16, 16, seed=7)
    narrow = [g.float() for g in gradients]
    wide, found = (solve_with(g, o, 16) for g, o in ((gradients, omega), (narrow, omega.float())))
    sizes = found.S > 5e-5
    assert found.S.dtype == torch.float32
    assert bool(sizes.all()) == (ratio > 0.5)
    # The error of a vector is that of fp32 over the gap to its neighbours.
    assert ((found.S - wide.S).abs() / wide.S)[sizes].max() < 5e-3
    for basis in (found.U, found.V):
        squares = basis.mT @ basis
        eye = torch.diag_embed(squares.diagonal(dim1=1, dim2=2).round())
        torch.testing.assert_close(squares, eye, rtol=0, atol=2e-5)
    restored = (found.U * found.S[:, None]) @ found.V.mT
    torch.testing.assert_close(restored, torch.stack(narrow), rtol=0, atol=2e-5)


def test_a_fresh_sketch_keeps_the_signs_of_earlier_bases():
    """On an unchanged gradient no vector turns, whatever Ω; on its negative no basis does."""
    g = decaying(30, 20)
    first = solve([g], 5, 8)
    turned = 0
    for seed in range(1, 9):
        again = solve([g], 5, 8, q=3, seed=seed, earlier=(first.U, first.V))
        torch.testing.assert_close(again, first, rtol=1e-6, atol=1e-6)
        negative = solve([-g], 5, 8, q=3, seed=seed, earlier=(first.U, first.V))
        torch.testing.assert_close(negative.U, first.U, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(negative.S, -first.S, rtol=1e-6, atol=1e-6)
        # The control: the sketch's own signs are others.
        fresh = solve([g], 5, 8, q=3, seed=seed)
        turned += int(((fresh.U * first.U).sum(1) < 0).sum())
    assert turned > 8


@pytest.mark.parametrize("side", ["U", "V"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bases_that_are_not_orthonormal_show_in_the_values(dtype, side, monkeypatch):
    gradients = [decaying(30, 20, seed=seed, ratio=0.8).to(dtype) for seed in range(3)]
    omega = draw(3, 20, 8, seed=7).to(dtype)
    good = solve_with(gradients, omega, 5)
    exact = svd._small_svd

    def spoilt(square):
        found = exact(square)
        getattr(found, side)[1, :, 3] = getattr(found, side)[1, :, 2]  # one direction twice
        return found

    assert solve_with(gradients, omega, 5, earlier=(good.U, good.V)).S.isfinite().all()
    monkeypatch.setattr(svd, "_small_svd", spoilt)
    found = solve_with(gradients, omega, 5, earlier=(good.U, good.V))
    assert found.S.isnan().all(1).tolist() == [False, True, False]
    assert torch.equal(found.S[::2], good.S[::2])


@pytest.mark.parametrize("rank", [0, 2])
def test_what_the_gradient_does_not_determine_is_zero(rank):
    g = draw(10, rank) @ draw(rank, 8, seed=1) if rank else torch.zeros(10, 8, dtype=F64)
    svd = solve([g], 4, 6)
    assert not svd.U[0][:, rank:].any() and not svd.V[0][:, rank:].any()
    torch.testing.assert_close((svd.U[0] * svd.S[0]) @ svd.V[0].T, g)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_the_values(bad):
    good, g = decaying(10, 8), decaying(10, 8)
    g[3, 2] = bad
    svd = solve([g, good], 3, 5)
    assert svd.S[0].isnan().all()
    # The other matrix of the stack is solved as if nothing had happened.
    torch.testing.assert_close(svd.S[1:], solve([good, good], 3, 5).S[1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("condition", [1e0, 1e3, 1e5])
def test_gram_qr_is_as_exact_as_householders(condition):
    """A GPU's way, in fp32: the factorization with a positive diagonal is unique."""
    ratio = condition ** (-1 / 15)
    wide = torch.stack([decaying(60, 16, ratio=ratio, seed=seed) for seed in range(3)])
    tall = wide.float()
    q, r = gram_qr(tall)
    assert q.dtype == r.dtype == torch.float32
    eye = torch.eye(16).expand(3, 16, 16)
    torch.testing.assert_close(q.mT @ q, eye, rtol=0, atol=1e-6)
    torch.testing.assert_close(q @ r, tall, rtol=0, atol=3e-7)
    exact_q, exact_r = torch.linalg.qr(tall.double())
    signs = exact_r.diagonal(dim1=1, dim2=2).sign()
    torch.testing.assert_close(q.double(), exact_q * signs[:, None], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 3])
def test_gram_qr_of_fewer_directions_than_columns(rank):
    tall = (draw(2, 40, rank) @ draw(2, rank, 8, seed=1)).float()
    q, r = gram_qr(tall)
    torch.testing.assert_close(q @ r, tall, rtol=0, atol=1e-5)
    values = torch.linalg.svdvals(q)
    torch.testing.assert_close(values[:, :rank], torch.ones(2, rank), rtol=0, atol=1e-5)
    assert values.isfinite().all() and (values < 1 + 1e-5).all()


@pytest.mark.parametrize("size", [(12, 4), (13, 5), (7, 1)])
def test_a_random_basis_is_orthonormal_and_covers_every_row(size):
    basis = draw_basis("a:left", size)
    torch.testing.assert_close(basis.T @ basis, torch.eye(size[1], dtype=F64), rtol=0, atol=1e-15)
    assert (basis != 0).sum(1).tolist() == [1] * size[0]
    others = [draw_basis(key, size) for key in ("a:right", "b:left")]
    assert size == (7, 1) or all(not torch.equal(other, basis) for other in others)
    assert torch.equal(draw_basis("a:left", size), basis)


def test_sketches_depend_on_name_and_refresh_alone():
    keys = [("a", 0), ("b", 0), ("a", 1)]
    found = draw_sketches(keys, (5, 3), torch.zeros(1, dtype=F64))
    assert torch.equal(draw_sketches(keys[1:], (5, 3), found), found[1:])
    assert all((other - found[0]).abs().max() > 0.1 for other in found[1:])
