# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank and dense linears on one device, applied group by group.

The linears of a group have one input: q, k, v; o; gate, up; down. A group's module has no
parameters: it is called with the linears, which the sublayers own. A plan of tensor parallelism
replaces the modules of a group by its edges (`parallel.edge`), which have the same arguments.

A product keeps its input for the gradient of its weight. `gated_linear` keeps σ's or SwiGLU's
factors alone and recomputes its input in backward: per token, memory falls by r for every
bottleneck with σ but a block's last, and by 2 f for every SwiGLU. In compiled blocks the compiler
decides what is kept (`compat.compiler`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_lr.models.kept import end_recomputation, keep


class LowRankLinear(nn.Module):
    """Factors of W ≈ B A, applied by the group: A (r, d_in), B (d_out, r), LaX's gate (1,)."""

    def __init__(self, d_in: int, d_out: int, rank: int, gated: bool = False) -> None:
        super().__init__()
        self.A = nn.Linear(d_in, rank, bias=False)
        self.B = nn.Linear(rank, d_out, bias=False)
        # Shape (1,), because FSDP2 shards along dimension 0 and does not support scalars.
        self.gate = nn.Parameter(self.A.weight.new_ones(1)) if gated else None


class LowRankGroup(nn.Module):
    """B σ(A x + g · carried) of every linear of a group (CoLA, Eq. 3; LaX)."""

    def __init__(
        self, use_silu: Iterable[bool], down: nn.Module, up: nn.Module, mix: nn.Module | None
    ) -> None:
        super().__init__()
        self.use_silu = list(use_silu)  # by linear whether σ is SiLU, or the identity
        self.down, self.mix, self.up = down, mix, up

    def forward(
        self,
        x: "Tensor | Gated",
        linears: Sequence[LowRankLinear],
        norm: nn.Module | None = None,
        carried: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs (b, s, d_out), and latents A x (b, s, r) before the mix."""
        # The input x is (b, s, d_in); ``carried`` has the latents of the previous block, if any.
        latents = self.down(x, linears, norm)  # A x: (b, s, r) per linear
        h = latents
        if self.mix is not None:
            h = self.mix(h, carried, linears)  # LaX: + g · the previous block's latents
        return self.up(h, linears, self.use_silu), latents  # B σ(h): (b, s, d_out) per linear


class DenseGroup(nn.Module):
    """W x of every linear of a full-rank group, by ``product``."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(
        self,
        x: Tensor,
        linears: Sequence[nn.Module],
        norm: nn.Module | None = None,
        carried: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return one output (b, s, d_out) per linear of x (b, s, d_in), and no latents."""
        return self.product(x, linears, norm), []


class Dense(nn.Module):
    """The norm, if any, and W x; see `used_width` for ``pads``."""

    def __init__(self, pads: bool | None = False) -> None:
        super().__init__()
        self.pads = pads

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Return one output (b, s, d_out) per linear of x (b, s, d_in)."""
        x = x if norm is None else norm(x)
        weights = [linear.weight for linear in linears]
        widths = [used_width(w, self.pads) for w in weights]
        if widths == [w.shape[0] for w in weights] and x.shape[-1] == weights[0].shape[1]:
            return [linear(x) for linear in linears]
        whole = Gated(x, None, False)
        return [gated_linear(whole, w, width) for w, width in zip(weights, widths, strict=True)]


class Down(nn.Module):
    """The norm, if any, and A x."""

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Return one latent A x (b, s, r) per linear of x (b, s, d_in)."""
        x = x if norm is None else norm(x)
        if not torch.is_grad_enabled():
            return [linear.A(x) for linear in linears]
        return down_products(x, [linear.A.weight for linear in linears])


class GatedDown(nn.Module):
    """A (σ(gate) · up) of SwiGLU's factors, which it keeps in the place of their product."""

    def forward(
        self, x: "Gated", linears: Sequence[LowRankLinear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Return one latent (b, s, r) per linear of the factors (b, s, f)."""
        if not torch.is_grad_enabled():  # nothing is kept: the kernel of the product is faster
            product = x.product()
            return [linear.A(product) for linear in linears]
        return [gated_linear(x, linear.A.weight) for linear in linears]


class Up(nn.Module):
    """B σ(h); see `used_width` for ``pads``."""

    def __init__(self, keeps_input: bool = False, pads: bool | None = False) -> None:
        super().__init__()
        # Whether σ(h) is kept for backward, not h alone, as by the last group of a block: with σ(h)
        # saved in front of the product, checkpointing does not repeat it.
        self.keeps_input, self.pads = keeps_input, pads

    def forward(
        self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear], use_silu: Sequence[bool]
    ) -> list[Tensor]:
        """Return one output (b, s, d_out) per linear of its latent h (b, s, r), before σ."""
        if self.keeps_input or not torch.is_grad_enabled():
            active = activated(latents, use_silu)
            return [linear.B(h) for h, linear in zip(active, linears, strict=True)]
        outputs = []
        for h, linear, silu in zip(latents, linears, use_silu, strict=True):
            b = linear.B
            width = used_width(b.weight, self.pads)
            if silu or width != b.weight.shape[0]:
                outputs.append(gated_linear(Gated(h, None, silu), b.weight, width))
            else:
                outputs.append(b(h))
        return outputs


class Mix(nn.Module):
    """LaX: add the previous block's latents, projection by projection."""

    def forward(
        self,
        latents: Sequence[Tensor],
        carried: Sequence[Tensor] | None,
        linears: Sequence[LowRankLinear],
    ) -> list[Tensor]:
        """Compute A_i x_i + g · A_(i-1) x_(i-1), (b, s, r) per linear."""
        return mix(latents, carried, [linear.gate for linear in linears])


class Swiglu(nn.Module):
    """σ(gate) · up, where σ is SiLU or the identity."""

    def __init__(self, silu: bool) -> None:
        super().__init__()
        self.silu = silu

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Multiply (b, s, f)."""
        return Gated(gate, up, self.silu).product()


class SwigluFactors(Swiglu):
    """σ(gate) · up for `GatedDown`, which multiplies."""

    def forward(self, gate: Tensor, up: Tensor) -> "Gated":  # type: ignore[override]
        """Return the factors (b, s, f)."""
        return Gated(gate, up, self.silu)


def mix(
    latents: Sequence[Tensor], carried: Sequence[Tensor] | None, gates: Sequence[Tensor | None]
) -> list[Tensor]:
    """Add g · carried to each latent, with one gate g (1,) per linear; None is g = 1."""
    if carried is None:
        return list(latents)
    mixed = []
    for h, previous, g in zip(latents, carried, gates, strict=True):
        mixed.append(h + (previous if g is None else g * previous))
    return mixed


def activated(latents: Sequence[Tensor], use_silu: Sequence[bool]) -> list[Tensor]:
    """Return σ(h) for every latent h."""
    return [F.silu(h) if silu else h for h, silu in zip(latents, use_silu, strict=True)]


class Gated(NamedTuple):
    """The factors of σ(gate) · up, multiplied only where they are used."""

    gate: Tensor  # (b, s, f), or a latent (b, s, r)
    up: Tensor | None  # (b, s, f); None for σ(gate) alone
    silu: bool  # whether σ is SiLU, or the identity

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


def unpadded(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight from that of the padded one."""
    if gradient.shape == weight.shape:
        return gradient
    m, n = weight.shape
    return gradient[:m, :n].contiguous()


class _GatedLinear(torch.autograd.Function):
    """Forward W (σ(gate) · up), with a padded W that is not kept; backward repeats the product."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,  # (b, s, f), or a latent (b, s, r)
        up: Tensor | None,  # (b, s, f)
        silu: bool,
        weight: Tensor,  # A (r, f), or B (d_out, r), not padded
        width: int,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        end_recomputation(gate, up, weight)
        ctx.silu, ctx.width = silu, width

        def compute() -> tuple[Tensor]:
            used = padded(weight, width, gate.shape[-1])
            return (F.linear(Gated(gate, up, silu).product(), used),)

        # Low-rank checkpointing repeats up-projections.
        (out,) = compute() if up is None else keep(compute)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor, None]:
        gate, up, weight = ctx.saved_tensors
        active = F.silu(gate) if ctx.silu else gate
        dweight = gradient.flatten(0, -2).T @ (active if up is None else active * up).flatten(0, -2)
        dgate, dup = gradient @ padded(weight, ctx.width, gate.shape[-1]), None
        if up is not None:
            dup = dgate * active
            dgate = dgate.mul_(up)  # in place: f-wide, and not needed any more
        if ctx.silu:
            dgate = torch.ops.aten.silu_backward(dgate, gate)
        return dgate, dup, None, unpadded(dweight, weight), None


def gated_linear(hidden: Gated, weight: Tensor, width: int | None = None) -> Tensor:
    """Apply A (σ(gate) · up), or B σ(h) to a latent h (CoLA, Eq. 3); keep the factors alone."""
    # A (r, f) takes as many features as come, see `used_width`; the result (b, s, width) has r
    # features by default, of B (d_out, r) it has d_out.
    out: Tensor = _GatedLinear.apply(*hidden, weight, width or weight.shape[0])
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
