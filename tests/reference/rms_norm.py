# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""RMSNorm in fp64, on inputs for which half precision has to round only once.

Weights with a single power of two in every row pick one feature each, and γ is a power of two: the
product with them is exact in any dtype and over any ranks. What the norm then gives differs from
the exact number by the rounding of its result, and by whatever it did to the statistic.
"""

import torch
from torch import Tensor

BATCH, TOKENS, DIM, EPS = 2, 32, 64, 1e-2


def inputs(dtype: torch.dtype, outputs: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """x (b, s, d) with tokens of different size, the smallest below √ε; γ (d,); A (outputs, d)."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(BATCH, TOKENS, DIM, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-2, 2, TOKENS, dtype=x.dtype)[:, None]
    gamma = 2.0 ** torch.randint(-2, 3, (DIM,), generator=generator)
    weight = torch.zeros(outputs, DIM)
    chosen = torch.randperm(DIM, generator=generator)[:outputs]
    weight[torch.arange(outputs), chosen] = 2.0 ** torch.randint(
        -2, 3, (outputs,), generator=generator
    )
    return x.to(dtype), gamma.to(dtype), weight.to(dtype)


def normalized(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    """The norm and the product with A, in fp64 (b, s, outputs)."""
    x, gamma, weight = x.double(), gamma.double(), weight.double()
    rms = (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()
    return (x / rms * gamma) @ weight.T


def half_units(found: Tensor, exact: Tensor) -> float:
    """Largest error in halves of a unit in the last place: rounding once costs at most 1."""
    _, exponent = torch.frexp(exact)
    half = torch.ldexp(torch.full_like(exact, torch.finfo(found.dtype).eps / 4), exponent)
    return float(((found.double() - exact).abs() / half).max())


STATISTIC_ERROR = (DIM + 4) * 2.0**-24
"""Of a fp32 sum of squares in any order; rounded are additions, squares, and a root, squared."""

LIMIT = {
    # The result's rounding; what fp32 lost before it is below a hundredth of bf16's.
    torch.bfloat16: 1.01,
    # In halves of fp32's unit, 2⁻²⁵ at least: half the statistic's error, then some operations.
    torch.float32: (STATISTIC_ERROR / 2 + 6 * 2.0**-24) / 2.0**-25,
}
"""Largest `half_units` of a norm whose statistic is fp32, by dtype."""
