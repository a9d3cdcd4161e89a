# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Megatron-LM's tensor parallelism of the full-rank model on paper."""

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.formula import PlanFormula, backward, forward
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic

_HALVES = ("all_gather", "reduce_scatter")


class MegatronFormula(PlanFormula):
    """2bsd in each pass (BOOST, Table 6); token shards split each sum in two halves."""

    name = "megatron"
    low_rank = False

    def block(
        self, shape: ModelShape, settings: PlanSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        payloads = [n * shape.dim] * 2
        if settings.comm == "all_reduce":
            return [forward("all_reduce", payloads), backward("all_reduce", payloads)]
        halves = [make(op, payloads) for make in (forward, backward) for op in _HALVES]
        # The norms see a shard of the tokens, so their weights' gradients are summed.
        return [*halves, backward("all_reduce", [shape.dim] * 2)]

    def embedding(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """Token shards of the stream give shards of its gradient, which are gathered."""
        rows = super().embedding(shape, settings, n)
        if settings.comm == "sequence":
            rows.append(backward("all_gather", [n * shape.dim], scope="embedding"))
        return rows

    def head(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """As `PlanFormula.head`; token shards are gathered in front of the output."""
        if settings.comm == "all_reduce":
            return super().head(shape, settings, n)
        stream = [n * shape.dim]
        norm_weight = backward("all_reduce", [shape.dim])
        return [forward("all_gather", stream), backward("reduce_scatter", stream), norm_weight]
