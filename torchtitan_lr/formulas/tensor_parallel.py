# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of tensor parallelism in closed form: calls and elements, by part and pass.

BOOST counts the elements of the payloads per decoder block and pass: 2bsd at full rank,
5bsd + 2bs·d_ff for vanilla low-rank tensor parallelism (Eq. 2), 7bsr for BTP (Eq. 3, Table 6). Its
factor of two for backward holds for BTP and full rank; vanilla's backward differs, and depends on
which linears share the all-reduce of their input's gradient. Here stands every call of every plan
in both passes.

The formulas are independent of the plans that run (`parallel.plans`): they state on paper what a
plan should send, so that a measured step can disagree. Both sides are joined by the plan's name.

n is the number of tokens b·s in a micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_lr.formulas.traffic import Traffic, backward, forward, merge

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.parallel.plans import TPSettings

COLUMN_MULTIPLE = 8
"""A payload with the norm's statistic as a column is padded to a multiple of this width."""


class PlanFormula:
    """One plan on paper. The defaults hold for a residual stream that every rank has whole.

    Attributes:
        shards_stream: Whether a rank holds d/T features of the residual stream. Its norms then
            exchange a statistic per token.
        shards_latents: Whether a rank holds r/T features of each latent.
        shards_heads: Whether a rank attends with its share of the heads, and not with all of them.
    """

    shards_stream: bool = False
    shards_latents: bool = False
    shards_heads: bool = True

    def block(
        self, shape: LlamaArgs, settings: TPSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """Return the collectives of one decoder block, without a learned gate's (T > 1).

        Args:
            shape: Shape and family of the model.
            settings: The plan's settings.
            n: Tokens of the micro-batch.
            ranks: T.
            column_multiple: Padding of a payload with a statistic column; 1 for none.
        """
        raise NotImplementedError

    def embedding(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """Return the collectives of the embedding, sharded along d; arguments as of `block`."""
        return [forward("all_gather", [n * shape.dim], scope="embedding")]

    def head(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """Return the collectives of final norm and head, without the gather of logits."""
        return [backward("all_reduce", [n * shape.dim])]

    def factors(self, d_in: int, d_out: int, rank: int, t: int) -> list[tuple[int, ...]]:
        """Shapes of A and B, (d_in, d_out) wide and of a rank, on one of t ranks.

        A rank multiplies with what it stores: these are also the shapes of its products.
        """
        if self.shards_stream:
            return [(rank, d_in // t), (d_out // t, rank)]
        return [(rank // t, d_in), (d_out, rank // t)]


class BTPFormula(PlanFormula):
    """Bottleneck-aware, r-wide payloads: 7bsr per pass, two norms' statistics (BOOST, Eq. 3)."""

    shards_stream = True

    def block(
        self, shape: LlamaArgs, settings: TPSettings, n: int, ranks: int, column_multiple: int
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
                sent[0] = _round_up(payloads[0] + 1, column_multiple)
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

    def embedding(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """Nothing: the stream is sharded as the embedding is."""
        return []

    def head(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
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


class VanillaFormula(PlanFormula):
    """The fair form of BOOST's Eq. 2: heads sharded by reduce-scatter and all-gather."""

    shards_latents = True

    def block(
        self, shape: LlamaArgs, settings: TPSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        d, f = shape.dim, shape.ffn_dim
        rows = [forward("all_reduce", [n * d, n * f, n * f, n * d])]  # o, gate, up, down
        rows += self.heads([n * d, n * shape.kv_dim, n * shape.kv_dim])
        # Gradients of the inputs of A_q,k,v and A_gate,up (d wide), and of A_down (f wide).
        copies = 2 if settings.grouping else 5
        return [*rows, backward("all_reduce", [*[n * d] * copies, n * f])]

    def heads(self, qkv: list[int]) -> list[Traffic]:
        """Return the traffic before and after attention, whose output is as wide as q."""
        return [
            forward("reduce_scatter", qkv),
            backward("all_gather", qkv),
            forward("all_gather", qkv[:1]),
            backward("reduce_scatter", qkv[:1]),
        ]


class VanillaReplicatedFormula(VanillaFormula):
    """The form that BOOST measures against: every rank attends with every head."""

    shards_heads = False

    def heads(self, qkv: list[int]) -> list[Traffic]:
        """All of q, k and v on every rank; backward, the gradient of A_o's input."""
        return [forward("all_reduce", qkv), backward("all_reduce", qkv[:1])]


class MegatronFormula(PlanFormula):
    """2bsd in each pass (BOOST, Table 6); token shards split each sum in two halves."""

    def block(
        self, shape: LlamaArgs, settings: TPSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        payloads = [n * shape.dim] * 2
        if settings.comm == "all_reduce":
            return [forward("all_reduce", payloads), backward("all_reduce", payloads)]
        both = ("all_gather", "reduce_scatter")
        halves = [make(op, payloads) for make in (forward, backward) for op in both]
        # The norms see a shard of the tokens, so their weights' gradients are summed.
        return [*halves, backward("all_reduce", [shape.dim] * 2)]

    def embedding(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """Token shards of the stream give shards of its gradient, which are gathered."""
        rows = super().embedding(shape, settings, n)
        if settings.comm == "sequence":
            rows.append(backward("all_gather", [n * shape.dim], scope="embedding"))
        return rows

    def head(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """As `PlanFormula.head`; token shards are gathered in front of the output."""
        if settings.comm == "all_reduce":
            return super().head(shape, settings, n)
        stream = [n * shape.dim]
        norm_weight = backward("all_reduce", [shape.dim])
        return [forward("all_gather", stream), backward("reduce_scatter", stream), norm_weight]


class CaatFormula(PlanFormula):
    """CAAT-Net: p times Megatron's payloads, 2·p·bsd in each pass, and two norms' weights."""

    def block(
        self, shape: LlamaArgs, settings: TPSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        shared = n * int(shape.sync_fraction * shape.dim)
        rows = _partial_reductions([shared] * 2, settings, ranks)
        return [*rows, backward("all_reduce", [shape.dim] * 2)]

    def embedding(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """Return a gather whose backward sums the gradients of all lanes."""
        op = "all_to_all" if settings.wide_sums else "reduce_scatter"
        gradient = backward(op, [n * shape.dim], scope="embedding")
        return [*super().embedding(shape, settings, n), gradient]

    def head(self, shape: LlamaArgs, settings: TPSettings, n: int) -> list[Traffic]:
        """Return the sum of the norm weight's gradient; the lanes' streams stay on their ranks."""
        return [backward("all_reduce", [shape.dim])]


class BTPCaatFormula(BTPFormula):
    """BTP's payloads, p times as wide, and its synchronized statistic (experimental)."""

    def block(
        self, shape: LlamaArgs, settings: TPSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """As `PlanFormula.block`."""
        payloads: list[int] = []
        for widths, _ in chunk_groups(shape):
            shared = [n * int(shape.sync_fraction * width) for width in widths]
            payloads += [sum(shared)] if settings.grouping else shared
        statistics = [make("all_reduce", [n] * 2, "statistic") for make in (forward, backward)]
        return [*_partial_reductions(payloads, settings, ranks), *statistics]


FORMULAS: dict[str, PlanFormula] = {
    "btp": BTPFormula(),
    "vanilla": VanillaFormula(),
    "vanilla_replicated": VanillaReplicatedFormula(),
    "megatron": MegatronFormula(),
    "caat": CaatFormula(),
    "btp_caat": BTPCaatFormula(),
}
"""Formulas by the name of their plan; a plan from outside the package adds its own."""

UNSPLIT = PlanFormula()
"""What holds on a single rank, whatever the plan."""


def formula_of(settings: TPSettings, tp_degree: int) -> PlanFormula:
    """Return the formula of a plan; on a single rank that of none.

    Args:
        settings: With the plan named (not ``auto``) where T > 1.
        tp_degree: Tensor-parallel ranks T.
    """
    return UNSPLIT if tp_degree == 1 else FORMULAS[settings.plan]


def chunk_groups(shape: LlamaArgs) -> list[tuple[list[int], bool]]:
    """Ranks of q, k, v; o; gate, up; down, and whether a norm stands in front of the group."""
    attention, ffn = shape.rank_attention, shape.rank_ffn
    return [([attention] * 3, True), ([attention], False), ([ffn] * 2, True), ([ffn], False)]


def _partial_reductions(payloads: Sequence[int], settings: TPSettings, ranks: int) -> list[Traffic]:
    """Return equal sums of both passes; wide backward sums add fp32 and send half precision."""
    payloads = [payload for payload in payloads if payload]
    if not payloads:
        return []
    rows = [forward("all_reduce", payloads)]
    if not settings.wide_sums:
        return [*rows, backward("all_reduce", payloads)]
    padded = [_round_up(payload, ranks) for payload in payloads]
    return [*rows, backward("all_to_all", padded), backward("all_gather", padded)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def model_traffic(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, tokens: int
) -> list[Traffic]:
    """Return every tensor-parallel collective of one micro-batch.

    Args:
        shape: Shape and family of the model.
        settings: The plan.
        tp_degree: Ranks T; at 1 there is nothing to send.
        tokens: Tokens n of the micro-batch.

    Returns:
        Rows for the embedding, every block, the head and the loss.
    """
    if tp_degree == 1:
        return []
    rows = FORMULAS[settings.plan].embedding(shape, settings, tokens)
    for i in range(shape.n_layers):
        block = block_traffic(shape, settings, tokens, first_block=i == 0, ranks=tp_degree)
        rows += [replace(row, scope=f"block {i}") for row in block]
    rows += head_traffic(shape, settings, tokens)
    if settings.loss_parallel:
        # The log-sum-exp of every token is gathered from the ranks, in one call per chunk of
        # tokens, and the loss is summed. A chunk is an eighth of the tokens, from 512 to 4096; all
        # up to 512 or d.
        size = tokens
        if tokens > max(shape.dim, 512):
            size = min(max(-(-tokens // 8), 512), 4096)
        chunks = [tp_degree * min(size, tokens - start) for start in range(0, tokens, size)]
        rows.append(forward("all_gather", chunks, "loss", scope="head"))
        rows.append(forward("all_reduce", [1], "loss", scope="head"))
    return merge(rows)


def block_traffic(
    shape: LlamaArgs,
    settings: TPSettings,
    tokens: int,
    first_block: bool = False,
    column_multiple: int = COLUMN_MULTIPLE,
    ranks: int = 1,
) -> list[Traffic]:
    """Return the collectives of one decoder block (T > 1).

    Args:
        shape: Shape and family of the model.
        settings: The plan.
        tokens: Tokens n of the micro-batch.
        first_block: Whether it is the first block, which mixes no latents.
        column_multiple: Padding of a payload with a statistic column; 1 for none.
        ranks: T; an fp32 sum's payload is padded to a multiple of it; 1 for no padding.
    """
    formula = FORMULAS[settings.plan]
    rows = [*formula.block(shape, settings, tokens, ranks, column_multiple)]
    # A learned gate on latent shards: its gradient is summed over the ranks, once per group.
    shards = formula.shards_latents or settings.comm == "sequence"
    if shape.family == "lax" and shape.lax_gate == "scalar" and shards and not first_block:
        rows.append(backward("all_reduce", [3, 1, 2, 1]))
    return merge(rows)


def head_traffic(shape: LlamaArgs, settings: TPSettings, tokens: int) -> list[Traffic]:
    """Return the collectives of the final norm and the vocabulary-parallel head (T > 1)."""
    rows = FORMULAS[settings.plan].head(shape, settings, tokens)
    if not settings.loss_parallel:
        rows = [*rows, forward("all_gather", [tokens * shape.vocab_size])]
    return merge(replace(row, scope="head") for row in rows)
