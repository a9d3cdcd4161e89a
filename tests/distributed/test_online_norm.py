# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The norms of a feature-sharded stream against RMSNorm on one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import rms_norm
from tests.reference.rms_norm import DIM as DIM_64
from tests.reference.rms_norm import EPS
from tests.support.parity_cases import relative, tp_mesh
from tests.support.rank_pool import RankPool
from torchtitan_lr.collectives import FEATURES, TOKENS, Ranks, all_gather, own_slice
from torchtitan_lr.parallel.btp import Reduction, online_down, sync_norm
from torchtitan_lr.parallel.paired import gather_from_ranks, reduce_from_ranks, scatter_to_ranks

BATCH, SEQUENCE, DIM = 2, 4, 16
RANKS_OF_LATENTS = (3, 5)

FORMS = [(grouped, sequence) for grouped in (True, False) for sequence in (True, False)]


def inputs(kind: str) -> tuple[Tensor, Tensor, list[Tensor], float]:
    """The whole x, γ and A's, equal on every rank, and ε."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, gamma, eps = draw(BATCH, SEQUENCE, DIM), 1 + 0.5 * draw(DIM), 1e-6
    if kind == "tiny":
        x, eps = 1e-4 * x, 1e-2
    if kind == "unequal":
        x = x * torch.logspace(-3, 3, 4, dtype=x.dtype).repeat_interleave(DIM // 4)
    if kind == "zero":
        x[0, 1:3] = 0.0
    return x, gamma, [draw(r, DIM) for r in RANKS_OF_LATENTS], eps


def shard(x: Tensor, ranks: Ranks) -> Tensor:
    """Slice the last dimension so that every rank's leaf gets the whole gradient."""
    return scatter_to_ranks(x, ranks, FEATURES)


def online(
    x: Tensor, gamma: Tensor, weights: list[Tensor], eps: float, ranks: Ranks, form: Any
) -> list[Tensor]:
    """Whole tensors in, whole latents out, through `online_down` on shards."""
    how = Reduction(ranks, *form)
    shards = [shard(weight, ranks) for weight in weights]
    latents = online_down(shard(x, ranks), shard(gamma, ranks), x.shape[-1], eps, shards, how)
    if how.sequence:
        latents = [gather_from_ranks(latent, ranks, TOKENS) for latent in latents]
    return latents


def sync(x: Tensor, gamma: Tensor, weights: list[Tensor], eps: float, ranks: Ranks) -> list[Tensor]:
    """The same through `sync_norm`."""
    normed = sync_norm(shard(x, ranks), shard(gamma, ranks), x.shape[-1], eps, ranks)
    return [reduce_from_ranks(F.linear(normed, shard(w, ranks)), ranks) for w in weights]


def errors_against_plain(kind: str, form: Any) -> list[float]:
    """Relative errors of latents and gradients, `form` None for the sync norm; on a rank."""
    ranks = Ranks.of(tp_mesh(4))
    runs = []
    for distributed in (False, True):
        x, gamma, weights, eps = inputs(kind)
        x, gamma, *weights = (t.requires_grad_() for t in (x, gamma, *weights))
        if not distributed:
            normed = F.rms_norm(x, (x.shape[-1],), gamma, eps)
            out = [F.linear(normed, weight) for weight in weights]
        elif form is None:
            out = sync(x, gamma, weights, eps, ranks)
        else:
            out = online(x, gamma, weights, eps, ranks, form)
        sum(y.sin().sum() for y in out).backward()  # type: ignore[union-attr]
        runs.append([*out, x.grad, gamma.grad, *(w.grad for w in weights)])
    return [relative(b, a) for a, b in zip(*runs, strict=True)]  # type: ignore[arg-type]


def all_errors(kind: str) -> dict[Any, list[float]]:
    return {form: errors_against_plain(kind, form) for form in [*FORMS, None]}


@pytest.mark.parametrize("kind", ["plain", "tiny", "unequal", "zero"])
def test_every_form_equals_rms_norm(kind: str, four_ranks: RankPool) -> None:
    """In fp64, whose sums in another order differ by some 1e-15."""
    for by_form in four_ranks.run(all_errors, kind):
        for form, errors in by_form.items():
            assert len(errors) == 6
            assert max(errors) < 1e-12, form


def rounding_errors(dtype: torch.dtype) -> dict[Any, float]:
    """`half_units` of every form, of the sync norm (None) and of the head; on a rank."""
    ranks = Ranks.of(tp_mesh(4))
    x, gamma, weight = rms_norm.inputs(dtype)
    found = {
        form: torch.cat(online(x, gamma, list(weight.split([10, 6])), EPS, ranks, form), -1)
        for form in FORMS
    }
    found[None] = sync(x, gamma, [weight], EPS, ranks)[0]
    normed = sync_norm(shard(x, ranks), shard(gamma, ranks), DIM_64, EPS, ranks, gather=True)
    logits = torch.nn.functional.linear(normed, own_slice(weight, ranks, 0))
    (found["head"],) = all_gather([logits], ranks, FEATURES)
    exact = rms_norm.normalized(x, gamma, weight)
    return {form: rms_norm.half_units(output, exact) for form, output in found.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_output_is_the_exact_one_rounded_once(dtype: torch.dtype, four_ranks: RankPool) -> None:
    for errors in four_ranks.run(rounding_errors, dtype):
        assert len(errors) == 6
        for form, error in errors.items():
            assert error <= rms_norm.LIMIT[dtype], form
