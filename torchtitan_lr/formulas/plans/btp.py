# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bottleneck-aware tensor parallelism on paper: r-wide payloads (BOOST, Eq. 3)."""

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.formula import (
    Kept,
    PlanFormula,
    backward,
    forward,
    latent_width,
    round_up,
)
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic


class BTPFormula(PlanFormula):
    """BOOST, section 4: 7bsr per pass, and the statistics of two norms."""

    name = "btp"
    shards_stream = True

    def block(
        self, shape: ModelShape, settings: PlanSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        sequence, online = settings.comm == "sequence", settings.norm == "online"
        reduce = "reduce_scatter" if sequence else "all_reduce"
        rows: list[Traffic] = []
        for widths, has_norm in chunk_groups(shape):
            payloads = [sum(widths)] if settings.grouping else widths
            column = has_norm and online and settings.norm_stat == "column"
            sent = list(payloads)
            if column:
                sent[0] = round_up(payloads[0] + 1, column_multiple)
            rows.append(forward(reduce, [n * width for width in sent]))
            # Backward, of the copies that the column-parallel B's were given.
            rows.append(backward(reduce, [n * width for width in payloads]))
            if sequence:
                rows.append(forward("all_gather", [n * width for width in payloads]))
                rows.append(backward("all_gather", [n * width for width in payloads]))
            if has_norm and not online:
                rows.append(forward("all_reduce", [n], "statistic"))
                rows.append(backward("all_reduce", [n], "statistic"))
            elif has_norm:
                if not column:
                    rows.append(forward(reduce, [n], "statistic"))
                if sequence:  # each rank knows dS of its own tokens only
                    rows.append(backward("all_gather", [n], "statistic"))
        return rows

    def embedding(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """Nothing: the stream is sharded as the embedding is."""
        return []

    def head(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """``plain`` gathers the stream, and all-reduces its gradient: bsd each way.

        An all-reduce is worth two. ``scatter`` gathers γ ⊙ x and scales the logits, so a
        reduce-scatter is enough.
        """
        stream, statistic = [n * shape.dim], [n]
        if settings.head == "scatter":
            return [
                forward("all_gather", stream),
                forward("all_reduce", statistic, "statistic"),
                backward("reduce_scatter", stream),
                backward("all_reduce", statistic, "statistic"),
            ]
        return [forward("all_gather", stream), backward("all_reduce", stream)]

    def kept(self, shape: ModelShape, settings: PlanSettings | None, n: int, t: int) -> Kept:
        """Return a shard of the input, nd/T, whole latents, and each norm's statistic, n numbers.

        With token shards the latents are 7nr/T. What was gathered from them in front of the
        up-projections, 7nr, is kept too: gathering again would communicate.
        """
        assert settings is not None
        sequence, online = settings.comm == "sequence", settings.norm == "online"
        latents = n * latent_width(shape)
        if sequence:
            latents += latents // t
        statistics = 2 * n // (t if sequence and online else 1)
        return Kept(n * shape.dim // t + latents, statistics)


def chunk_groups(shape: ModelShape) -> list[tuple[list[int], bool]]:
    """Ranks of q, k, v; o; gate, up; down, and whether a norm stands in front of the group."""
    attention, ffn = shape.rank_attention, shape.rank_ffn
    return [([attention] * 3, True), ([attention], False), ([ffn] * 2, True), ([ffn], False)]
