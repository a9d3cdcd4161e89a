# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net: what lanes add up and in which precision."""

import pytest
import torch

from torchtitan_lr.models.lanes import share_channels


@pytest.mark.parametrize("wide", [True, False])
def test_forward_adds_lanes_up_in_fp32(wide: bool) -> None:
    """256 + 1 + 1 + 1 + 3 is 262; bf16, whose unit is 2 there, forgets every 1 on its way."""
    terms = (
        torch.tensor([256.0, 1, 1, 1, 3], dtype=torch.bfloat16).view(1, 1, 5, 1).expand(1, 2, 5, 4)
    )
    out = share_channels(terms, 3, wide)  # `wide` is backward's
    assert (out[..., :3] == 262).all()
    assert torch.equal(out[..., 3:], terms[..., 3:])


@pytest.mark.parametrize(("wide", "expected"), [(True, 262), (False, 260)])
def test_backward_adds_lanes_up_as_it_is_told(wide: bool, expected: int) -> None:
    x = torch.zeros(1, 2, 5, 4, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.tensor([256.0, 1, 1, 1, 3], dtype=torch.bfloat16).view(1, 1, 5, 1)
    share_channels(x, 3, wide).backward(gradient.expand_as(x))
    assert x.grad is not None
    assert (x.grad[..., :3] == expected).all()
    assert torch.equal(x.grad[..., 3:], gradient.expand_as(x)[..., 3:])
