# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank linears and the edges of the bottleneck chunks.

A factorised block is a chain of chunks: an up-projection B, d- or f-wide operations, the next
down-projection A. The activations between chunks are r-wide, so plans split the model there. The
borders are the *edges* below: modules without parameters that receive the linears they apply and
work on a whole group (q, k, v; gate, up). A parallel plan replaces edges by name; the block's code
does not change.
"""

from collections.abc import Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.models.grouped_linear import grouped_linears
from torchtitan_lr.models.head_loss import linear_loss
from torchtitan_lr.models.remade import Gated, gated_linear, remakes, silu_linear


class LowRankLinear(nn.Module):
    """The factors of one linear map, W ≈ B A; applied by the edges, not by a call.

    Args:
        d_in: Input width; A.weight is (r, d_in).
        d_out: Output width; B.weight is (d_out, r).
        rank: Rank r.
        gated: Whether to hold a learned factor on the latent carried from the previous block.
    """

    def __init__(self, d_in: int, d_out: int, rank: int, gated: bool = False) -> None:
        super().__init__()
        self.A = nn.Linear(d_in, rank, bias=False)
        self.B = nn.Linear(rank, d_out, bias=False)
        # Shape (1,), because FSDP2 shards along dimension 0 and does not support scalars.
        self.gate = nn.Parameter(self.A.weight.new_ones(1)) if gated else None


class DenseEdge(nn.Module):
    """Full-rank group: the norm, if any, then W of every linear."""

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Apply a group of dense linears to one input.

        Args:
            x: Input (b, s, d_in).
            linears: The group; all take the same input.
            norm: Applied to x first.

        Returns:
            One output (b, s, d_out) per linear.
        """
        x = x if norm is None else norm(x)
        return [linear(x) for linear in linears]


class DownEdge(nn.Module):
    """End of a chunk: the norm, if any, then A of every linear of the group."""

    takes_gated = True
    """Whether the input may be a `Gated`; edges of other classes get tensors."""

    def forward(
        self, x: Tensor | Gated, linears: Sequence[LowRankLinear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Compress one input into the latents of a group.

        Args:
            x: Input (b, s, d_in), or its two factors, without a norm.
            linears: The group; all take the same input.
            norm: Applied to x first.

        Returns:
            One pre-activation latent A x (b, s, r) per linear.
        """
        if isinstance(x, Gated):
            return [gated_linear(x, linear.A.weight) for linear in linears]
        x = x if norm is None else norm(x)
        if remakes(x):
            return grouped_linears(x, [linear.A.weight for linear in linears])
        return [linear.A(x) for linear in linears]


class UpEdge(nn.Module):
    """Start of a chunk: B of every linear of the group, each on its own latent."""

    applies_silu = True
    """Whether it can apply σ itself; edges of other classes get activated latents."""

    def forward(
        self,
        latents: Sequence[Tensor],
        linears: Sequence[LowRankLinear],
        use_silu: Sequence[bool] | None = None,
    ) -> list[Tensor]:
        """Expand the latents of a group.

        Args:
            latents: One (b, s, r) per linear, after mixing and, without ``use_silu``, activation.
            linears: The group.
            use_silu: The latents to which σ = SiLU has not been applied yet.

        Returns:
            One output (b, s, d_out) per linear.
        """
        silu = use_silu or [False] * len(linears)
        return [
            silu_linear(latent, linear.B.weight) if active else linear.B(latent)
            for latent, linear, active in zip(latents, linears, silu, strict=True)
        ]


def activate(latents: Sequence[Tensor], use_silu: Sequence[bool]) -> list[Tensor]:
    """Apply σ = SiLU to the latents (b, s, r) whose bottleneck has one (CoLA, Eq. 3)."""
    return [F.silu(h) if silu else h for h, silu in zip(latents, use_silu, strict=True)]


def low_rank_group(
    x: Tensor | Gated,
    linears: Sequence[nn.Module],
    down: nn.Module,
    up: nn.Module,
    use_silu: Sequence[bool],
    norm: nn.Module | None = None,
    mix: nn.Module | None = None,
    carried: Sequence[Tensor] | None = None,
    last: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Apply a group of factorised linears to one input: B A x, with σ CoLA's B σ(A x) (Eq. 3).

    Args:
        x: Input (b, s, d_in), or a `Gated` for an edge that takes one.
        linears: The group, of `LowRankLinear`; all take the same input.
        down: Edge that applies A, such as `DownEdge`.
        up: Edge that applies B, such as `UpEdge`.
        use_silu: Whether each linear has σ = SiLU in its bottleneck.
        norm: Applied to x first.
        mix: Edge between A and σ, such as LaX's `MixEdge`, which adds carried latents.
        carried: The latents of the previous block; None in the first block.
        last: Whether the group ends the block. Its σ(h) is then saved before the product, because
            torch's checkpointing stops at the last saved tensor and does not repeat the product.

    Returns:
        One output (b, s, d_out) per linear, and their pre-activation latents A x (b, s, r).
    """
    latents = down(x, linears, norm)
    mixed = latents if mix is None else mix(latents, carried, linears)
    if not last and getattr(up, "applies_silu", False) and remakes(mixed[0]):
        return up(mixed, linears, use_silu), latents
    return up(activate(mixed, use_silu), linears), latents  # B σ(A x)


class EmbedEdge(nn.Module):
    """The embedding look-up."""

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in embedding.weight (V, d); gives (b, s, d)."""
        return F.embedding(tokens, embedding.weight)


class HeadEdge(nn.Module):
    """The final norm and the output projection."""

    def forward(self, x: Tensor, norm: nn.Module | None, output: nn.Linear) -> Tensor:
        """Map the residual stream (b, s, d) to logits (b, s, V) with output.weight (V, d)."""
        return F.linear(x if norm is None else norm(x), output.weight)

    def loss(self, x: Tensor, norm: nn.Module | None, output: nn.Linear, targets: Tensor) -> Tensor:
        """Return the summed -log p(target) of targets (b, s), without whole logits; a scalar."""
        return linear_loss(x if norm is None else norm(x), output.weight, targets)


class TokenEmbedding(nn.Embedding):
    """Token embedding whose look-up is an edge.

    The edge is a child of the embedding, not of the model. A pipeline split therefore keeps both on
    one stage, and FSDP's hooks run before the edge.
    """

    def __init__(self, vocab_size: int, dim: int, embed: nn.Module | None = None) -> None:
        super().__init__(vocab_size, dim)
        self.embed = EmbedEdge() if embed is None else embed

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens (b, s) as (b, s, d); with lanes at full rank as (b, s, G, d)."""
        out: Tensor = self.embed(input, self)
        return out


class OutputProjection(nn.Linear):
    """Output projection that applies the final norm too, through one edge (see above)."""

    def __init__(self, dim: int, vocab_size: int, head: nn.Module | None = None) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.head = HeadEdge() if head is None else head

    def forward(
        self, input: Tensor, norm: nn.Module | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Turn the residual stream (b, s, d) into logits (b, s, V), or into a loss.

        Args:
            input: The residual stream, in the layout of the edge.
            norm: The final norm.
            targets: Token ids (b, s), for the scalar sum of -log p(target); see `linear_loss`.
        """
        # A call of this module either way, so that FSDP has gathered the weight.
        out: Tensor = (
            self.head(input, norm, self)
            if targets is None
            else cast(HeadEdge, self.head).loss(input, norm, self, targets)
        )
        return out
