# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BTP: `tests.reference.btp`, and what its reductions take in memory."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.reference.btp import PlainBTP
from tests.unit.tiny import build_tiny
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.costs.kernels import Recorder
from torchtitan_lr.costs.rehearsal import fake_ranks
from torchtitan_lr.costs.tp_messages import model_traffic
from torchtitan_lr.models.llama import Rows, apply_rope
from torchtitan_lr.parallel.btp import Reduction, down_projections, online_down, up_projections
from torchtitan_lr.parallel.plan_parts import TPSettings

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


BATCH, SEQ = 2, 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plain_block_is_that_of_one_device_and_sends_what_the_formula_says(ranks: int) -> None:
    model = build_tiny("cola", torch.float64)
    block, args = model.layers["1"], model.model_args
    table = torch.view_as_real(model.freqs_cis)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SEQ, args.dim, generator=generator, dtype=torch.float64)
    upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    weights = dict(block.named_parameters())

    expected, _ = block(x, Rows(table))
    exact = torch.autograd.grad((expected * upstream).sum(), [*weights.values()])

    plain = PlainBTP(weights, ranks, args.n_heads, args.norm_eps, partial(apply_rope, table=table))
    found = torch.cat(plain.block(list(x.chunk(ranks, -1))), -1)
    gradients = torch.autograd.grad((found * upstream).sum(), [*weights.values()])

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    # What the ranks send in forward is what the formula says of a block.
    rows = model_traffic(args, TPSettings("btp"), ranks, BATCH * SEQ)
    stated = [row for row in rows if row.scope == "block 1" and row.pass_ == "forward"]
    sent = sum(torch.Size(shape).numel() for shape in plain.sent)
    assert sent == sum(row.elements for row in stated)
    # The control: a message of full width for every group is more.
    assert sent < 4 * BATCH * SEQ * args.dim
