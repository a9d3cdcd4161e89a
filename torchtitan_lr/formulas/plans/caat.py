# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net's partial reductions on paper, at full rank and, experimental, in BTP's bottlenecks."""

from collections.abc import Sequence

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.btp import BTPFormula, chunk_groups
from torchtitan_lr.formulas.plans.formula import PlanFormula, backward, forward, round_up
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic


class CaatFormula(PlanFormula):
    """CAAT-Net: p times Megatron's payloads, 2·p·bsd in each pass, and two norms' weights."""

    name = "caat"
    low_rank = False

    def block(
        self, shape: ModelShape, settings: PlanSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        rows = _partial_reductions([n * _shared(shape, shape.dim)] * 2, settings, ranks)
        return [*rows, backward("all_reduce", [shape.dim] * 2)]

    def embedding(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """Return a gather whose backward sums the gradients of all lanes."""
        op = "all_to_all" if settings.wide_sums else "reduce_scatter"
        gradient = backward(op, [n * shape.dim], scope="embedding")
        return [*super().embedding(shape, settings, n), gradient]

    def head(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """Return the sum of the norm weight's gradient; the lanes' streams stay on their ranks."""
        return [backward("all_reduce", [shape.dim])]


class BTPCaatFormula(BTPFormula):
    """BTP's payloads, p times as wide, and its synchronized statistic."""

    name = "btp_caat"

    def block(
        self, shape: ModelShape, settings: PlanSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        payloads: list[int] = []
        for widths, _ in chunk_groups(shape):
            shared = [n * _shared(shape, width) for width in widths]
            payloads += [sum(shared)] if settings.grouping else shared
        statistics = [make("all_reduce", [n] * 2, "statistic") for make in (forward, backward)]
        return [*_partial_reductions(payloads, settings, ranks), *statistics]


def _partial_reductions(
    payloads: Sequence[int], settings: PlanSettings, ranks: int
) -> list[Traffic]:
    """Return equal sums of both passes; wide backward sums add fp32 and send half precision."""
    payloads = [payload for payload in payloads if payload]
    if not payloads:
        return []
    rows = [forward("all_reduce", payloads)]
    if not settings.wide_sums:
        return [*rows, backward("all_reduce", payloads)]
    padded = [round_up(payload, ranks) for payload in payloads]
    return [*rows, backward("all_to_all", padded), backward("all_gather", padded)]


def _shared(shape: ModelShape, width: int) -> int:
    return int(shape.sync_fraction * width)
