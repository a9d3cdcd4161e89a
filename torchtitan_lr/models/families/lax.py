# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``llama_lax``: LaX (Zhang et al., 2025), CoLA whose latents cross from block to block.

    y_i = B_i σ(A_i x_i + g · A_(i-1) x_(i-1))

In block i every linear adds the latent of the same linear of block i - 1, before σ. The gate g is
1, or learned with one number per linear (``low_rank.lax_gate = "scalar"``). The first block has
nothing to add. `MixEdge` adds, between A and σ of `models.layers.low_rank_group`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchtitan_lr.models.families.cola import CoLA
from torchtitan_lr.models.layers import LowRankLinear

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


class MixEdge(nn.Module):
    """LaX: add the previous block's latents, projection by projection."""

    def forward(
        self,
        latents: Sequence[Tensor],
        carried: Sequence[Tensor] | None,
        linears: Sequence[LowRankLinear],
    ) -> list[Tensor]:
        """Compute A_i x_i + g · A_(i-1) x_(i-1).

        Args:
            latents: This block's A_i x_i, one (b, s, r) per linear.
            carried: The previous block's, in the same order; None in the first block.
            linears: The group, which holds the gates g where they are learned (else g = 1).

        Returns:
            The mixed latents (b, s, r).
        """
        if carried is None:
            return list(latents)
        return [
            latent + (previous if linear.gate is None else linear.gate * previous)
            for latent, previous, linear in zip(latents, carried, linears, strict=True)
        ]
