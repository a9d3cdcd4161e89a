# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A recorded function by itself: what is kept is found again where it lay."""

import torch
from torch import Tensor

from torchtitan_lr.models.marks import keep
from torchtitan_lr.parallel.recompute.replay import Recording


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_parts_of_a_kept_tensor() -> None:
    """As grouped latents are: kept as one, used in parts, of which sin saves its argument."""
    weight = draw(4, 6, seed=0)

    def function(x: Tensor) -> Tensor:
        first, second = keep(x @ weight).split([2, 4], dim=-1)
        return first.sin().sum() + second.T.sin().square().sum()

    x = draw(3, 4, seed=1)
    gradients = []
    for run in (function, lambda x: Recording(function, (x,), {}).forward()):
        leaf = x.clone().requires_grad_()
        run(leaf).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    # By hand: d sin = cos, d sin² = 2 sin cos = sin(2 ·).
    h = x @ weight
    exact = torch.cat([h[:, :2].cos(), (2 * h[:, 2:]).sin()], -1) @ weight.T
    assert torch.allclose(gradients[1], exact, rtol=1e-12, atol=1e-12)  # fp64, sums of six
