# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank linears, and the products of a group of linears with the gradients written out.

A product keeps its input for the gradient of its weight. `gated_linear` keeps σ's or SwiGLU's
factors alone and makes its input again in backward: per token, memory falls by r for every
bottleneck with σ but a block's last, and by 2 f for every SwiGLU. Or it keeps the input too
(``activation_checkpoint.keep_inputs``). In compiled blocks the compiler does either
(`compat.dispatch`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_lr.models.low_rank_checkpoint import end_recomputation, keep


class LowRankLinear(nn.Module):
    """Factors of W ≈ B A, applied by the group: A (r, d_in), B (d_out, r), LaX's gate (1,)."""

    def __init__(self, d_in: int, d_out: int, rank: int, gated: bool = False) -> None:
        super().__init__()
        self.A = nn.Linear(d_in, rank, bias=False)
        self.B = nn.Linear(rank, d_out, bias=False)
        # Shape (1,), because FSDP2 shards along dimension 0 and does not support scalars.
        self.gate = nn.Parameter(self.A.weight.new_ones(1)) if gated else None


def activated(latents: Sequence[Tensor], use_silu: Sequence[bool]) -> list[Tensor]:
    """Return σ(h) for every latent h."""
    return [F.silu(h) if silu else h for h, silu in zip(latents, use_silu, strict=True)]


class Gated(NamedTuple):
    """The factors of σ(gate) · up, multiplied only where they are used."""

    gate: Tensor  # (b, s, f), or a latent (b, s, r)
    up: Tensor | None = None  # (b, s, f); None for σ(gate) alone
    silu: bool = False  # whether σ is SiLU, or the identity

    def product(self) -> Tensor:
        """Multiply."""
        active = F.silu(self.gate) if self.silu else self.gate
        return active if self.up is None else active * self.up


def used_width(weight: Tensor, pads: bool | None) -> int:
    """Return the number of features that products with a weight (features, inputs) compute."""
    # With ``pads`` that is the next multiple of 32 for a width that 8 does not divide, while
    # gradients are computed: rows of an odd width begin at addresses that a GPU's fast kernels do
    # not take. None pads on a GPU. The added features are 0, and so are their gradients.
    width = weight.shape[0]
    pads = weight.is_cuda if pads is None else pads
    if not (pads and torch.is_grad_enabled()) or width % 8 == 0:
        return width
    return -(-width // 32) * 32


def padded(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return a weight (m, n) with rows and columns of zeros behind its own; itself if it fits."""
    m, n = weight.shape
    if (m, n) == (rows, columns):
        return weight
    return F.pad(weight, (0, columns - n, 0, rows - m))


def all_padded(weights: Sequence[Tensor], rows: int = 0, columns: int = 0) -> list[Tensor]:
    """Return weights (m_i, n) with ``rows`` more rows, and at least so many columns."""
    return [padded(w, len(w) + rows, max(columns, w.shape[1])) for w in weights]


def unpadded(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight from that of the padded one."""
    if gradient.shape == weight.shape:
        return gradient
    m, n = weight.shape
    return gradient[:m, :n].contiguous()


class _GatedLinear(torch.autograd.Function):
    """Forward W (σ(gate) · up), with a padded W that is not kept; backward may repeat the input."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,  # (b, s, f), or a latent (b, s, r)
        up: Tensor | None,  # (b, s, f)
        silu: bool,
        weight: Tensor,  # A (r, f), or B (d_out, r), not padded
        width: int,
        keeps: bool,  # the bracket
    ) -> Tensor:
        product = Gated(gate, up, silu).product() if keeps else None
        ctx.save_for_backward(gate, up, weight, product)
        end_recomputation(gate, up, weight)
        ctx.silu, ctx.width = silu, width

        def compute() -> tuple[Tensor]:
            used = padded(weight, width, gate.shape[-1])
            x = Gated(gate, up, silu).product() if product is None else product
            return (F.linear(x, used),)

        # Low-rank checkpointing keeps the latent A (σ(gate) · up), and repeats up-projections.
        (out,) = compute() if up is None else keep(compute)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, product = ctx.saved_tensors
        silu = ctx.silu and (product is None or up is not None)
        active = F.silu(gate) if silu else gate
        if product is None:
            product = active if up is None else active * up
        dweight = gradient.flatten(0, -2).T @ product.flatten(0, -2)
        dgate, dup = gradient @ padded(weight, ctx.width, gate.shape[-1]), None
        if up is not None:
            dup = dgate * active
            dgate = dgate.mul_(up)  # in place: f-wide, and not needed any more
        if ctx.silu:
            dgate = torch.ops.aten.silu_backward(dgate, gate)
        return dgate, dup, None, unpadded(dweight, weight), None, None


def gated_linear(
    hidden: Gated, weight: Tensor, width: int | None = None, keeps: bool = False
) -> Tensor:
    """Apply A (σ(gate) · up), or B σ(h) to a latent h (CoLA, Eq. 3); maybe keep its input too."""
    # A (r, f) takes as many features as come, see `used_width`; the result (b, s, width) has r
    # features by default, of B (d_out, r) it has d_out. Not within checkpointing: ``keeps``.
    out: Tensor = _GatedLinear.apply(*hidden, weight, width or weight.shape[0], keeps)
    return out


class _DownProducts(torch.autograd.Function):
    """Forward A x per linear; backward one product per kind of gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        # One variable argument: without gradients, the compiler compares numbers of arguments to
        # decide if a forward has a context, and is wrong for (ctx, x, *weights) with two weights.
        x, *weights = inputs  # (b, s, d_in); (r_i, d_in)
        # The weights themselves, not what is put side by side: a copy per block would survive when
        # FSDP frees the gathered weights.
        ctx.save_for_backward(x, *weights)
        return keep(lambda: tuple(F.linear(x, weight) for weight in weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        gradient = concatenated(gradients, dim=-1)  # (b, s, Σ r_i)
        dw = gradient.flatten(0, -2).T @ x.flatten(0, -2)  # (Σ r_i, d_in)
        dx = gradient @ concatenated(weights)  # (b, s, d_in)
        return (dx, *dw.split([weight.shape[0] for weight in weights]))


def down_products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Apply linears (r_i, d_in) to one x (b, s, d_in), with one product per kind of gradient."""
    # Low-rank checkpointing saves the outputs (b, s, r_i).
    return list(_DownProducts.apply(x, *weights))


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along a dimension; one alone is returned as it is, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def summed_products(gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient (b, s, d_in) of the input of linears (d_out_i, d_in) side by side."""
    # The gradient of the outputs is (b, s, Σ d_out_i). Weights are not concatenated: each sum over
    # a linear's outputs is added, in turn, in its dtype.
    sizes = [weight.shape[0] for weight in weights]
    parts = gradient.flatten(0, 1).split(sizes, dim=-1)
    total = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        if torch.compiler.is_compiling():
            total = total + part @ weight  # the compiler fuses sums, and copies for an addmm
        else:
            torch.addmm(total, part, weight, out=total)
    return total.unflatten(0, gradient.shape[:2])
