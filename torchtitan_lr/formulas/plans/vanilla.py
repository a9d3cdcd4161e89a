# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Vanilla tensor parallelism of factorised linears on paper (BOOST, Eq. 2), in both forms."""

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.formula import PlanFormula, backward, forward
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic


class VanillaFormula(PlanFormula):
    """The fair form of BOOST's Eq. 2: heads sharded by reduce-scatter and all-gather."""

    name = "vanilla"
    shards_latents = True

    def block(
        self, shape: ModelShape, settings: PlanSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        d, f = shape.dim, shape.ffn_dim
        rows = [forward("all_reduce", [n * d, n * f, n * f, n * d])]  # o, gate, up, down
        rows += self.heads(shape, n)
        # Gradients of the inputs of A_q,k,v and A_gate,up (d wide), and of A_down (f wide).
        copies = 2 if settings.grouping else 5
        return [*rows, backward("all_reduce", [*[n * d] * copies, n * f])]

    def heads(self, shape: ModelShape, n: int) -> list[Traffic]:
        """Return the traffic before and after attention, for n tokens."""
        qkv = [n * shape.dim, n * shape.kv_dim, n * shape.kv_dim]
        return [
            forward("reduce_scatter", qkv),
            backward("all_gather", qkv),
            forward("all_gather", [n * shape.dim]),  # attention's output
            backward("reduce_scatter", [n * shape.dim]),
        ]


class VanillaReplicatedFormula(VanillaFormula):
    """The form that BOOST measures against: every rank attends with every head."""

    name = "vanilla_replicated"
    shards_heads = False

    def heads(self, shape: ModelShape, n: int) -> list[Traffic]:
        """All of q, k and v on every rank; backward, the gradient of A_o's input."""
        qkv = [n * shape.dim, n * shape.kv_dim, n * shape.kv_dim]
        return [forward("all_reduce", qkv), backward("all_reduce", [n * shape.dim])]
