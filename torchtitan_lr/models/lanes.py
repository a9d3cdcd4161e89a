# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net: a model of G streams ("lanes") that share a part of their channels.

Every lane has its own residual stream, heads, hidden units and rows of the vocabulary. Its output
before the residual addition is a_i; the *partial reduction* P replaces it by

    y_i[:s] = Σ_j a_j[:s],    y_i[s:] = a_i[s:],    s = int(p · d)

(CAAT-Net, equations 8 and 12). P is its own adjoint (section 4 and appendix B). The norms' weights
get gradients of unequal streams, which are summed over the ranks. Lane i owns the i-th part of each
weight: p = 1 is the model without lanes exactly. One device has all lanes, a rank of
`parallel.megatron.CAAT` g = G/T. A stream is (b, s, g, d), so that everything that cuts a batch
finds it in front.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import SINGLE, Ranks, reduce
from torchtitan_lr.models.one_device import Group, OneDevice

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs


class _ContiguousGradient(torch.autograd.Function):
    """Identity; the gradient is laid out like its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Autograd does this when it accumulates. In a split backward (ZBVZeroBubble) it does not
        # accumulate, and a fused optimizer reads a transposed gradient in the wrong order.
        return gradient.contiguous()


def lane_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map each lane of x (b, s, g, d_in) by its own rows of a weight (g · o, d_in): (b, s, g o)."""
    batch, tokens, lanes, _ = x.shape
    if lanes == 1:
        return F.linear(x.squeeze(2), weight)
    inputs = x.flatten(0, 1).transpose(0, 1)  # (g, b s, d_in)
    out = torch.bmm(inputs, weight.unflatten(0, (lanes, -1)).mT)
    return out.transpose(0, 1).reshape(batch, tokens, -1)


def lane_terms(x: Tensor, weight: Tensor, lanes: int) -> Tensor:
    """Map each lane's part of x (b, s, g · i) by its own columns of a weight (d_out, g · i)."""
    # Returns one term of the whole product per lane, (b, s, g, d_out).
    if lanes == 1:
        return F.linear(x, weight).unsqueeze(2)
    inputs = x.unflatten(-1, (lanes, -1)).flatten(0, 1).transpose(0, 1)  # (g, b s, i)
    weight = _ContiguousGradient.apply(weight)
    out = torch.bmm(inputs, weight.unflatten(1, (lanes, -1)).permute(1, 2, 0))
    return out.transpose(0, 1).unflatten(0, x.shape[:2])


def lane_sum(x: Tensor, shared: int, wide: bool = True) -> Tensor:
    """Sum the shared first channels of x (b, s, g, d) over the lanes here: (b, s, 1, shared)."""
    # Half precision is summed in fp32 and rounded once; without ``wide``, after every term.
    x = x[..., :shared]
    if x.shape[2] == 1:
        return x
    if wide:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.sum(2, keepdim=True, dtype=dtype).to(x.dtype)
    total, *rest = x.split(1, dim=2)
    for term in rest:
        total = total + term
    return total


def spread(total: Tensor, x: Tensor) -> Tensor:
    """Put the sum of the shared channels (b, s, 1, shared) into every lane of x (b, s, g, d)."""
    shared = total.shape[-1]
    return torch.cat((total.expand(*x.shape[:-1], shared), x[..., shared:]), dim=-1)


class _ShareChannels(torch.autograd.Function):
    """Forward partial reduction, backward partial reduction."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, shared, wide_sums, ranks = inputs  # (b, s, g, d)
        ctx.shared, ctx.wide_sums, ctx.ranks = shared, wide_sums, ranks
        owned = x.shape[2] > 1  # the sum over one lane is a view of x
        return spread(reduce(lane_sum(x, shared), ranks, owned=owned), x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own = lane_sum(gradient, ctx.shared, ctx.wide_sums)
        owned = gradient.shape[2] > 1
        total = reduce(own, ctx.ranks, wide=ctx.wide_sums, owned=owned)
        return spread(total, gradient), None, None, None


def share_channels(x: Tensor, shared: int, wide_sums: bool = True, ranks: Ranks = SINGLE) -> Tensor:
    """Apply the partial reduction P to the terms (b, s, g, d) of the lanes of all ranks."""
    # The first ``shared`` channels are summed; 0 communicates nothing. ``wide_sums`` lets backward
    # sum in fp32 while it sends the dtype of x.
    if shared == 0:
        return x
    out: Tensor = _ShareChannels.apply(x, shared, wide_sums, ranks)
    return out


class Lanes(OneDevice):
    """Applies the weights of a model with lanes, which all are on this device."""

    def __init__(self, args: "LlamaArgs") -> None:
        self.lanes, self.shared = args.lanes, args.shared_channels(args.dim)
        self.wide_sums = args.backward_sum == "float32"

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d): (b, s, G, d); all lanes start alike."""
        x = super().embed(tokens, embedding)
        return x.unsqueeze(2).expand(-1, -1, self.lanes, -1)

    def product(
        self, group: Group, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None
    ) -> list[Tensor]:
        """Map the lanes' streams (b, s, G, d) to outputs side by side (b, s, d_out), or back."""
        if norm is not None:  # the lanes' own streams
            x = norm(x)
            return [lane_linear(x, linear.weight) for linear in linears]
        terms = [lane_terms(x, linear.weight, self.lanes) for linear in linears]
        return [share_channels(term, self.shared, self.wide_sums) for term in terms]

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the scores (b, s, V) of normalized streams (b, s, G, d), each of its own rows."""
        return lane_linear(x, weight)
