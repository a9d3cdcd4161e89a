# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`tests.reference.btp` is the block of one device, and sends what the formula says."""

from functools import partial

import pytest
import torch

from tests.reference.btp import PlainBTP
from tests.unit.tiny import build_tiny
from torchtitan_lr.costs.tp_messages import model_traffic
from torchtitan_lr.models.llama import apply_rope
from torchtitan_lr.parallel.plan_parts import TPSettings

BATCH, SEQ = 2, 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_of_ranks_is_that_of_one_device(ranks):
    model = build_tiny("cola", torch.float64)
    block, args = model.layers["1"], model.model_args
    table = torch.view_as_real(model.freqs_cis)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SEQ, args.dim, generator=generator, dtype=torch.float64)
    upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    weights = dict(block.named_parameters())

    expected, _ = block(x, table)
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
