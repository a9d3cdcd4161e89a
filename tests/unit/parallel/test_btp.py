# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BTP: the statistic of its norms against fp64, and what its reductions take in memory.

The norms on ranks are in tests/distributed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.costs.kernels import Recorder
from torchtitan_lr.costs.rehearsal import fake_ranks
from torchtitan_lr.parallel.btp import Reduction, down_projections, online_down, up_projections

TOKENS, FEATURES, RANK = 4096, 64, 32
LATENT, FACTOR = 4 * TOKENS * RANK, 4 * RANK * FEATURES
"""Bytes of a payload (1, s, r) and of a factor (r, d/T) in fp32."""


def peak_bytes(inputs: Sequence[Tensor], call: Callable[[], object]) -> int:
    with Recorder({x.untyped_storage()._cdata for x in inputs}) as living:
        call()
    return living.peak


def test_a_reduction_holds_its_payload_once_and_copies_no_factor() -> None:
    x, latent = torch.ones(1, TOKENS, FEATURES), torch.ones(1, TOKENS, RANK, requires_grad=True)
    gamma, a, b = torch.ones(FEATURES), torch.ones(RANK, FEATURES), torch.ones(FEATURES, RANK)
    with fake_ranks(2) as mesh:
        assert mesh is not None
        ranks = Ranks.of(mesh)
        with torch.no_grad():
            for n in (1, 2):
                summed = lambda n=n: down_projections(x, [a] * n, Reduction(ranks))  # noqa: E731
                down = peak_bytes([x, a], summed)
                assert down == n * LATENT + (n > 1) * n * FACTOR
            norm = (x, gamma, 2 * FEATURES, 0.0, [a], Reduction(ranks))
            online = peak_bytes([x, gamma, a], lambda: online_down(*norm))
            # Payload and normalized payload, and two statistics of a number per token.
            assert online <= 2 * LATENT + 3 * 4 * TOKENS + FACTOR
        (out,) = up_projections([latent], [b], ranks)
        inputs = [latent, b, out, gradient := torch.ones_like(out)]
        up = peak_bytes(inputs, lambda: torch.autograd.grad(out, latent, gradient))
        assert up == LATENT + FACTOR
