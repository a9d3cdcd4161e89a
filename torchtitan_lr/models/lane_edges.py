# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net on one device: a model of G streams ("lanes") that share a part of their channels.

Every lane has its own residual stream, heads, hidden units and rows of the vocabulary. Its output
before the residual addition is a_i; the *partial reduction* P replaces it by

    y_i[:s] = Σ_j a_j[:s],    y_i[s:] = a_i[s:],    s = int(p · d)

(CAAT-Net, equations 8 and 12). P is its own adjoint: backward applies it to the gradients, which
have passed through the norms by then (section 4). Weights have the shapes and names of the model
without lanes, lane i owning the i-th part of each: p = 1 is that model exactly.

A stream is (b, s, g, d) with the lanes that are here as the third dimension, so that everything
that cuts a batch finds it in front.

This code is independent of ranks; a plan assigns lanes to ranks. The low-rank families keep one
stream, split along its features, and have lanes in the latents (b, s, g, r): experimental, see
`LaneDownEdge`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.head_loss import linear_loss
from torchtitan_lr.models.layers import (
    DenseEdge,
    DownEdge,
    EmbedEdge,
    HeadEdge,
    LowRankLinear,
    UpEdge,
)
from torchtitan_lr.models.marks import save


class _ContiguousGradient(torch.autograd.Function):
    """Identity; the gradient is laid out like its tensor.

    Autograd does this when it accumulates. In a split backward (ZBVZeroBubble) it does not
    accumulate, and a fused optimizer reads a transposed gradient in the wrong order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def lane_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Map each lane by its own rows of a weight.

    Args:
        x: One input per lane (b, s, g, d_in).
        weight: (g · o, d_in), the lanes' rows one after the other.

    Returns:
        The lanes' outputs side by side, (b, s, g · o).
    """
    batch, tokens, lanes, _ = x.shape
    if lanes == 1:
        return F.linear(x.squeeze(2), weight)
    inputs = x.flatten(0, 1).transpose(0, 1)  # (g, b s, d_in)
    out = torch.bmm(inputs, weight.unflatten(0, (lanes, -1)).mT)
    return out.transpose(0, 1).reshape(batch, tokens, -1)


def lane_terms(x: Tensor, weight: Tensor, lanes: int) -> Tensor:
    """Map each lane's part of the features by its own columns of a weight.

    Args:
        x: The lanes' inputs side by side, (b, s, g · i).
        weight: (d_out, g · i), the lanes' columns one after the other.
        lanes: Their number g.

    Returns:
        One term of the whole product per lane, (b, s, g, d_out).
    """
    if lanes == 1:
        return F.linear(x, weight).unsqueeze(2)
    inputs = x.unflatten(-1, (lanes, -1)).flatten(0, 1).transpose(0, 1)  # (g, b s, i)
    weight = _ContiguousGradient.apply(weight)
    out = torch.bmm(inputs, weight.unflatten(1, (lanes, -1)).permute(1, 2, 0))
    return out.transpose(0, 1).unflatten(0, x.shape[:2])


def lane_sum(x: Tensor, shared: int, wide: bool = True) -> Tensor:
    """Sum the shared channels over the lanes of this device.

    Args:
        x: (b, s, g, d).
        shared: The number of shared channels.
        wide: Whether half precision is summed in fp32 and rounded once, not after every term.

    Returns:
        Tensor (b, s, 1, shared), of the dtype of x.
    """
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
    def forward(ctx: Any, x: Tensor, shared: int, wide: bool) -> Tensor:
        ctx.shared, ctx.wide = shared, wide
        (out,) = save(lambda: (spread(lane_sum(x, shared), x),))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return spread(lane_sum(gradient, ctx.shared, ctx.wide), gradient), None, None


def share_channels(x: Tensor, shared: int, wide: bool = True) -> Tensor:
    """Apply the partial reduction P to the lanes of one device.

    Args:
        x: The lanes' terms (b, s, g, d).
        shared: The number of channels that are summed, the first ones.
        wide: Precision of backward's sums, see `lane_sum`.

    Returns:
        The result for each lane, (b, s, g, d).
    """
    if shared == 0:
        return x
    out: Tensor = _ShareChannels.apply(x, shared, wide)
    return out


class LaneColumnEdge(nn.Module):
    """Norm and a full-rank group that starts from the lanes' own streams."""

    def forward(self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module) -> list[Tensor]:
        """Normalize every lane and map it by its rows of each linear.

        Args:
            x: Residual streams (b, s, G, d).
            linears: The group.
            norm: Applied to each lane.

        Returns:
            One output (b, s, d_out) per linear: the lanes' side by side, heads in their order.
        """
        x = norm(x)
        return [lane_linear(x, linear.weight) for linear in linears]


class LaneRowEdge(nn.Module):
    """A full-rank linear that ends in the lanes' streams, through the partial reduction."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.lanes, self.shared = args.lanes, args.shared_channels(args.dim)
        self.wide = args.backward_sum == "float32"

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Map each lane's part of x (b, s, d_in); gives (b, s, G, d_out) per linear."""
        terms = [lane_terms(x, linear.weight, self.lanes) for linear in linears]
        return [share_channels(term, self.shared, self.wide) for term in terms]


class LaneDownEdge(nn.Module):
    """Experimental: a low-rank group's down-projections, reduced in part only.

    Lane i multiplies its part of the features: a_i = A[:, i] x[i], r wide. The whole sum
    Σ a_i is A x; here each lane keeps its own channels from int(p · r) on.
    Equivalently, a bottleneck of rank p · r shared by all is joined by one of (1 - p) · r in
    each lane, a block-diagonal map.
    """

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.args = args

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Compress x (b, s, d_in) into latents (b, s, G, r), one per linear."""
        x = x if norm is None else norm(x)
        wide = self.args.backward_sum == "float32"
        latents = []
        for linear in linears:
            terms = lane_terms(x, linear.A.weight, self.args.lanes)
            shared = self.args.shared_channels(terms.shape[-1])
            latents.append(share_channels(terms, shared, wide))
        return latents


class LaneUpEdge(nn.Module):
    """Experimental: up-projections whose lanes start from their own latents."""

    def forward(self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]) -> list[Tensor]:
        """Expand latents (b, s, G, r), one per linear, into outputs (b, s, d_out)."""
        pairs = zip(latents, linears, strict=True)
        return [lane_linear(latent, linear.B.weight) for latent, linear in pairs]


class LaneEmbedEdge(nn.Module):
    """The embedding look-up: every lane starts with the same vectors."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in embedding.weight (V, d); gives (b, s, G, d)."""
        x = F.embedding(tokens, embedding.weight)
        return x.unsqueeze(2).expand(-1, -1, self.lanes, -1)


class LaneHeadEdge(nn.Module):
    """The final norm and the output projection: each lane scores its part of the vocabulary."""

    def forward(self, x: Tensor, norm: nn.Module | None, output: nn.Linear) -> Tensor:
        """Map the streams (b, s, G, d) to logits (b, s, V) with output.weight (V, d)."""
        return lane_linear(x if norm is None else norm(x), output.weight)

    def loss(self, x: Tensor, norm: nn.Module | None, output: nn.Linear, targets: Tensor) -> Tensor:
        """As `HeadEdge.loss`, for the streams (b, s, G, d)."""
        return linear_loss(x if norm is None else norm(x), output.weight, targets)


def dense_edges(args: LlamaArgs) -> tuple[nn.Module, nn.Module]:
    """Return the edges in front of and behind a full-rank group."""
    return (LaneColumnEdge(), LaneRowEdge(args)) if args.lanes > 1 else (DenseEdge(), DenseEdge())


def low_rank_edges(args: LlamaArgs) -> tuple[nn.Module, nn.Module]:
    """Return the edges that end and start a bottleneck chunk."""
    return (LaneDownEdge(args), LaneUpEdge()) if args.lanes > 1 else (DownEdge(), UpEdge())


def end_edges(args: LlamaArgs) -> tuple[nn.Module, nn.Module]:
    """Return the edges of the embedding and of the head; low-rank families keep one stream."""
    if args.lanes > 1 and not args.low_rank:
        return LaneEmbedEdge(args.lanes), LaneHeadEdge()
    return EmbedEdge(), HeadEdge()
