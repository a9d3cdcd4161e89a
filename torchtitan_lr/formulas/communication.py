# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of tensor parallelism in closed form: calls and elements, by part and pass.

BOOST counts the elements of the payloads per decoder block and pass: 2bsd at full rank,
5bsd + 2bs·d_ff for vanilla low-rank tensor parallelism (Eq. 2), 7bsr for BTP (Eq. 3, Table 6). Its
factor of two for backward holds for BTP and full rank; vanilla's backward differs, and depends on
which linears share the all-reduce of their input's gradient. Here every call of every plan is
listed, in both directions. `data_parallel` continues with weights and gradients.

n is the number of tokens b·s in a micro-batch on one rank.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic, merge

COLUMN_MULTIPLE = 8
"""A payload that carries the norm's statistic as a column is padded to a multiple of this width."""


def model_traffic(
    shape: ModelShape, settings: PlanSettings, tp_degree: int, tokens: int
) -> list[Traffic]:
    """Every collective of tensor parallelism in one micro-batch.

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
    blocks = [
        replace(row, scope=f"block {i}")
        for i in range(shape.n_layers)
        for row in block_traffic(shape, settings, tokens, first_block=i == 0, ranks=tp_degree)
    ]
    ends = head_traffic(shape, settings, tokens) + loss_traffic(settings, tokens)
    return merge([*embedding_traffic(shape, settings, tokens), *blocks, *ends])


def block_traffic(
    shape: ModelShape,
    settings: PlanSettings,
    tokens: int,
    first_block: bool = False,
    column_multiple: int = COLUMN_MULTIPLE,
    ranks: int = 1,
) -> list[Traffic]:
    """Collectives of one decoder block (T > 1).

    Args:
        shape: Shape and family of the model.
        settings: The plan.
        tokens: Tokens n of the micro-batch.
        first_block: Whether it is the first, which mixes no latents.
        column_multiple: Padding of a payload with a statistic column; 1 for none.
        ranks: T, to a multiple of which an fp32 sum's payload is padded; 1 for none.

    Returns:
        Rows with the scope ``block``.
    """
    if settings.plan == "btp":
        rows = _btp_block(shape, settings, tokens, column_multiple)
    elif settings.plan == "megatron":
        rows = _megatron_block(shape, settings, tokens)
    elif settings.plan == "caat":
        rows = _caat_block(shape, settings, tokens, ranks)
    elif settings.plan == "btp_caat":
        rows = _btp_caat_block(shape, settings, tokens, ranks)
    else:
        rows = _vanilla_block(shape, settings, tokens)
    # A learned gate on shards of the latents: its gradient is a sum over the ranks, group by group.
    shards = settings.plan.startswith("vanilla") or settings.comm == "sequence"
    if shape.family == "lax" and shape.lax_gate == "scalar" and shards and not first_block:
        rows.append(_backward("all_reduce", [3, 1, 2, 1]))
    return merge(rows)


def _btp_block(
    shape: ModelShape, settings: PlanSettings, n: int, column_multiple: int
) -> list[Traffic]:
    """BOOST, section 4: r-wide payloads in front of each B (Eq. 3), statistics of two norms."""
    sequence, online = settings.comm == "sequence", settings.norm == "online"
    reduce = "reduce_scatter" if sequence else "all_reduce"
    rows: list[Traffic] = []
    for widths, has_norm in _groups(shape):
        payloads = [sum(widths)] if settings.grouping else widths
        column = has_norm and online and settings.norm_stat == "column"
        sent = list(payloads)
        if column:
            sent[0] = _round_up(payloads[0] + 1, column_multiple)
        rows.append(_forward(reduce, [n * width for width in sent]))
        # Backward, of the copies that the column-parallel B's were given.
        rows.append(_backward(reduce, [n * width for width in payloads]))
        if sequence:
            rows.append(_forward("all_gather", [n * width for width in payloads]))
            rows.append(_backward("all_gather", [n * width for width in payloads]))
        if has_norm and not online:
            rows.append(_forward("all_reduce", [n], "statistic"))
            rows.append(_backward("all_reduce", [n], "statistic"))
        elif has_norm:
            if not column:
                rows.append(_forward(reduce, [n], "statistic"))
            if sequence:  # each rank knows dS of its own tokens only
                rows.append(_backward("all_gather", [n], "statistic"))
    return rows


def _vanilla_block(shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
    """BOOST, Eq. 2, and its fair form: heads sharded by reduce-scatter and all-gather."""
    d, d_kv, f = shape.dim, shape.kv_dim, shape.ffn_dim
    qkv = [n * d, n * d_kv, n * d_kv]
    rows = [_forward("all_reduce", [n * d, n * f, n * f, n * d])]  # o, gate, up, down
    if settings.plan == "vanilla":
        rows += [
            _forward("reduce_scatter", qkv),
            _backward("all_gather", qkv),
            _forward("all_gather", [n * d]),  # attention's output
            _backward("reduce_scatter", [n * d]),
        ]
    else:
        rows += [_forward("all_reduce", qkv), _backward("all_reduce", [n * d])]  # A_o's input
    # Gradients of the inputs of A_q,k,v and A_gate,up (d wide), and of A_down (f wide).
    copies = 2 if settings.grouping else 5
    rows.append(_backward("all_reduce", [*[n * d] * copies, n * f]))
    return rows


def _megatron_block(shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
    """Full rank: 2bsd in each pass (BOOST, Table 6); token shards split each sum in two halves."""
    payloads = [n * shape.dim] * 2
    if settings.comm == "all_reduce":
        return [_forward("all_reduce", payloads), _backward("all_reduce", payloads)]
    halves = [make(op, payloads) for make in (_forward, _backward) for op in _HALVES]
    # The norms see a shard of the tokens, so their weights' gradients are summed.
    return [*halves, _backward("all_reduce", [shape.dim] * 2)]


def _caat_block(shape: ModelShape, settings: PlanSettings, n: int, ranks: int) -> list[Traffic]:
    """CAAT-Net: p times Megatron's payloads, 2·p·bsd in each pass, and two norms' weights."""
    rows = _partial_reductions([n * _shared(shape, shape.dim)] * 2, settings, ranks)
    return [*rows, _backward("all_reduce", [shape.dim] * 2)]


def _btp_caat_block(shape: ModelShape, settings: PlanSettings, n: int, ranks: int) -> list[Traffic]:
    """BTP's payloads, p times as wide, and its synchronized statistic."""
    payloads: list[int] = []
    for widths, _ in _groups(shape):
        shared = [n * _shared(shape, width) for width in widths]
        payloads += [sum(shared)] if settings.grouping else shared
    statistics = [make("all_reduce", [n] * 2, "statistic") for make in (_forward, _backward)]
    return [*_partial_reductions(payloads, settings, ranks), *statistics]


def _partial_reductions(
    payloads: Sequence[int], settings: PlanSettings, ranks: int
) -> list[Traffic]:
    """The same sums in both passes; backward's are fp32 behind half precision where asked."""
    payloads = [payload for payload in payloads if payload]
    if not payloads:
        return []
    rows = [_forward("all_reduce", payloads)]
    if not settings.wide_sums:
        return [*rows, _backward("all_reduce", payloads)]
    padded = [_round_up(payload, ranks) for payload in payloads]
    return [*rows, _backward("all_to_all", padded), _backward("all_gather", padded)]


def _shared(shape: ModelShape, width: int) -> int:
    return int(shape.sync_fraction * width)


def embedding_traffic(shape: ModelShape, settings: PlanSettings, tokens: int) -> list[Traffic]:
    """Collectives of the embedding, which is sharded along d: none for BTP (T > 1).

    CAAT-Net's lanes go separate ways from it, so its gradient is their sum.
    """
    if settings.plan in ("btp", "btp_caat"):
        return []
    payload = [tokens * shape.dim]
    rows = [_forward("all_gather", payload, scope="embedding")]
    if settings.plan == "caat":
        op = "all_to_all" if settings.wide_sums else "reduce_scatter"
        rows.append(_backward(op, payload, scope="embedding"))
    if settings.comm == "sequence":
        rows.append(_backward("all_gather", payload, scope="embedding"))
    return rows


def head_traffic(shape: ModelShape, settings: PlanSettings, tokens: int) -> list[Traffic]:
    """Collectives of the final norm and the vocabulary-parallel head (T > 1).

    ``plain`` gathers the stream, and all-reduces its gradient: bsd each way, an all-reduce being
    worth two. ``scatter`` gathers γ ⊙ x and scales the logits, so a reduce-scatter is enough.
    """
    stream, statistic = [tokens * shape.dim], [tokens]
    rows: list[Traffic] = []
    if settings.plan == "btp" and settings.head == "scatter":
        rows = [
            _forward("all_gather", stream),
            _forward("all_reduce", statistic, "statistic"),
            _backward("reduce_scatter", stream),
            _backward("all_reduce", statistic, "statistic"),
        ]
    elif settings.plan in ("btp", "btp_caat"):
        rows = [_forward("all_gather", stream), _backward("all_reduce", stream)]
    elif settings.plan == "caat":  # the lanes' streams stay; the norm's weight is one
        rows = [_backward("all_reduce", [shape.dim])]
    elif settings.comm == "sequence":
        rows = [_forward("all_gather", stream), _backward("reduce_scatter", stream)]
        rows.append(_backward("all_reduce", [shape.dim]))  # the norm's weight
    else:
        rows = [_backward("all_reduce", stream)]
    if not settings.loss_parallel:
        rows.append(_forward("all_gather", [tokens * shape.vocab_size]))
    return merge(replace(row, scope="head") for row in rows)


def loss_traffic(settings: PlanSettings, tokens: int) -> list[Traffic]:
    """Scalars per token of torch's loss parallel (T > 1): maximum, sum, and the label's logit."""
    if not settings.loss_parallel:
        return []
    return [_forward("all_reduce", [tokens] * 3, "loss", scope="loss")]


_HALVES = ("all_gather", "reduce_scatter")


def _groups(shape: ModelShape) -> list[tuple[list[int], bool]]:
    """Ranks of q, k, v; o; gate, up; down, and whether a norm stands in front of the group."""
    attention, ffn = shape.rank_attention, shape.rank_ffn
    return [([attention] * 3, True), ([attention], False), ([ffn] * 2, True), ([ffn], False)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _forward(
    op: str, payloads: Sequence[int], role: str = "activation", scope: str = "block"
) -> Traffic:
    return Traffic(scope, "forward", op, role, len(payloads), sum(payloads))


def _backward(
    op: str, payloads: Sequence[int], role: str = "activation", scope: str = "block"
) -> Traffic:
    return Traffic(scope, "backward", op, role, len(payloads), sum(payloads))
