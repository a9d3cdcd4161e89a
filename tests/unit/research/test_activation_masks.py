# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The masked reductions that CAAT-Net is compared with."""

import pytest
import torch

from scripts.research.activation_masks import MaskedRowEdge, mask_reductions
from tests.unit.tiny import build_tiny, tokens


@pytest.mark.parametrize("kind", ["top-k", "random"])
def test_sending_everything_is_the_full_model(kind) -> None:
    model = build_tiny("full", torch.float64)
    ids = tokens(model.model_args)
    logits = model(ids)
    mask_reductions(model, 4, kind, 1.0)
    torch.testing.assert_close(model(ids), logits)
    mask_reductions(model, 4, kind, 0.5)
    assert (model(ids) - logits).abs().max() > 1e-3


def test_the_largest_entries_of_each_token_and_rank_survive() -> None:
    terms = torch.randn(2, 3, 4, 10)
    mask = MaskedRowEdge(4, "top-k", 0.35).mask(terms)
    assert torch.equal(mask.sum(-1), torch.full((2, 3, 4), 3.0))
    kept, dropped = terms.abs()[mask == 1].view(2, 3, 4, 3), terms.abs().masked_fill(mask == 1, 0)
    assert (kept.amin(-1) >= dropped.amax(-1)).all()


def test_a_random_mask_keeps_its_share() -> None:
    torch.manual_seed(0)
    mask = MaskedRowEdge(4, "random", 0.25).mask(torch.randn(20, 50, 4, 10))
    assert mask.mean().item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("kind", ["top-k", "random"])
def test_backward_uses_the_mask_of_forward(kind) -> None:
    edge = MaskedRowEdge(4, kind, 0.5)
    terms = torch.randn(2, 3, 4, 10, requires_grad=True)
    masks = []
    original = edge.mask
    edge.mask = lambda t: masks.append(original(t)) or masks[-1]
    upstream = torch.randn(2, 3, 10)
    edge.reduce(terms).backward(upstream)
    (mask,) = masks
    assert torch.equal(terms.grad, mask * upstream.unsqueeze(2))  # by 0 or 1: nothing is rounded
