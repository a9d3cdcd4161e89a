# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``llama_lax``: LaX (Zhang et al., 2025), CoLA whose latents cross from block to block.

    y_i = B_i σ(A_i x_i + g · A_(i-1) x_(i-1))

In block i every linear adds the latent of the same linear of block i - 1, before σ. The gate g is
1, or learned with one number per linear (``low_rank.lax_gate = "scalar"``). The first block has
nothing to add. `MixEdge` adds, between A and σ of `models.linears.low_rank_group`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchtitan_lr.collectives import SINGLE, Edge, Ranks, copy_to_ranks, local
from torchtitan_lr.models.families.cola import CoLA
from torchtitan_lr.models.linears import LowRankLinear

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs


class LaX(CoLA):
    """CoLA with the previous block's latents in front of σ; its defaults are CoLA's."""

    name = "lax"
    lanes = False
    carries_latents = True
    gated = True

    def build_linear(
        self, args: "LlamaArgs", d_in: int, d_out: int, rank: int, first_block: bool
    ) -> LowRankLinear:
        """Build A (r, d_in), B (d_out, r) and, where it is learned, the gate g (1,)."""
        gated = args.lax_gate == "scalar" and not first_block
        return LowRankLinear(d_in, d_out, rank, gated)

    def build_mix(self) -> nn.Module:
        """Build the edge that adds the carried latents."""
        return MixEdge()

    def fingerprint(self, args: "LlamaArgs") -> dict[str, Any]:
        """CoLA's, and the kind of gate."""
        return super().fingerprint(args) | {"low_rank.lax_gate": args.lax_gate}


class MixEdge(Edge):
    """LaX: add the previous block's latents, projection by projection; local on any ranks.

    Args:
        ranks: The tensor-parallel ranks.
        sharded: Whether a rank holds only a part of each latent, along r or along the tokens.
            Then the gradient of a learned gate is a sum over the ranks.
    """

    def __init__(self, ranks: Ranks = SINGLE, sharded: bool = False) -> None:
        super().__init__(ranks)
        self.sharded = sharded

    def forward(
        self,
        latents: Sequence[Tensor],
        carried: Sequence[Tensor] | None,
        linears: Sequence[LowRankLinear],
    ) -> list[Tensor]:
        """Compute A_i x_i + g · A_(i-1) x_(i-1).

        Args:
            latents: This block's A_i x_i, one (b, s, r) per linear, in the plan's layout.
            carried: The previous block's, in the same order and layout; None in the first block.
            linears: The group, with the gates g (1,), Replicate, where they are learned (else
                g = 1).

        Returns:
            The mixed latents, in the same layout.
        """
        if carried is None:
            return list(latents)
        gates = [local(linear.gate) for linear in linears if linear.gate is not None]
        if gates and self.sharded:  # one collective for the group
            gates = list(copy_to_ranks(torch.cat(gates), self.ranks).split(1))
        gate = iter(gates)
        return [
            latent + (previous if linear.gate is None else next(gate) * previous)
            for latent, previous, linear in zip(latents, carried, linears, strict=True)
        ]
