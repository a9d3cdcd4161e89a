# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Vanilla tensor parallelism of factorised linears: each pair split as Megatron splits an MLP.

A is column-parallel and B row-parallel, so messages are as wide as a linear's output. This is the
baseline of BTP. The residual stream and other d- or f-wide activations are replicated; only the
latents are sharded, along r.

The fair form reduce-scatters q, k and v over the heads, so that each rank computes its own heads,
and gathers attention's output before A_o. BOOST's baseline (`vanilla_replicated`) all-reduces q, k
and v, and every rank computes all heads.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import FEATURES, Edge, local, reduce_over_ranks, scatter_sum
from torchtitan_lr.models.linears import LowRankLinear, SharedInput, shared_linears
from torchtitan_lr.models.norms import normalize


class VanillaDownEdge(Edge):
    """Norm and column-parallel A."""

    grouped: bool = True
    """Whether the group's linears share one backward all-reduce of their input."""

    sharded_input: bool = False
    """Whether the input is feature-sharded (attention's output)."""

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Compress an input into shards of the latents of a group.

        Args:
            x: Input (b, s, d_in), replicated; (b, s, d_in/T), Shard(-1), for `sharded_input`.
            linears: The group; A (r/T, d_in) is Shard(0).
            norm: Norm before them; weight (d_in,), Replicate.

        Returns:
            One latent (b, s, r/T), Shard(-1), per linear.
        """
        weights = [local(linear.A.weight) for linear in linears]
        x = x if norm is None else normalize(x, norm)
        dim = FEATURES if self.sharded_input else None
        shared = SharedInput(self.ranks, dim, saved="output")
        if not self.grouped:
            return [shared_linears(x, [weight], shared)[0] for weight in weights]
        return shared_linears(x, weights, shared)


class VanillaUpEdge(Edge):
    """Row-parallel B and the sum over the ranks."""

    sharded_output: bool = False
    """Whether each rank keeps a shard of the output's features (the heads of q, k and v), or all of
    it."""

    def forward(self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]) -> list[Tensor]:
        """Expand the latents of a group.

        Args:
            latents: One (b, s, r/T), Shard(-1), per linear.
            linears: The group; B (d_out, r/T) is Shard(1).

        Returns:
            One output per linear: (b, s, d_out), replicated, or (b, s, d_out/T), Shard(-1), for
            `sharded_output`.
        """
        pairs = zip(latents, linears, strict=True)
        outs = [F.linear(latent, local(linear.B.weight)) for latent, linear in pairs]
        # Not an all-reduce and a slice: the same forward, but it loses gradients.
        if self.sharded_output:
            return [scatter_sum(out, self.ranks, FEATURES) for out in outs]
        return [reduce_over_ranks(out, self.ranks) for out in outs]
