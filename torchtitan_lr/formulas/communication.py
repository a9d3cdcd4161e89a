# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of tensor parallelism in closed form: calls and elements, by part and pass.

BOOST counts the elements of the payloads per decoder block and pass: 2bsd at full rank,
5bsd + 2bs·d_ff for vanilla low-rank tensor parallelism (Eq. 2), 7bsr for BTP (Eq. 3, Table 6). Its
factor of two for backward holds for BTP and full rank; vanilla's backward differs, and depends on
which linears share the all-reduce of their input's gradient. `plans` lists every call of every plan
in both passes; this module sums them over a model. `data_parallel` covers weights and gradients.

n is the number of tokens b·s in a micro-batch on one rank.
"""

from dataclasses import replace

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.formula import backward, forward
from torchtitan_lr.formulas.plans.registry import FORMULAS
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic, merge

COLUMN_MULTIPLE = 8
"""A payload with the norm's statistic as a column is padded to a multiple of this width."""


def model_traffic(
    shape: ModelShape, settings: PlanSettings, tp_degree: int, tokens: int
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
    blocks = [
        replace(row, scope=f"block {i}")
        for i in range(shape.n_layers)
        for row in block_traffic(shape, settings, tokens, first_block=i == 0, ranks=tp_degree)
    ]
    ends = head_traffic(shape, settings, tokens) + loss_traffic(shape, settings, tokens, tp_degree)
    return merge([*embedding_traffic(shape, settings, tokens), *blocks, *ends])


def block_traffic(
    shape: ModelShape,
    settings: PlanSettings,
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


def embedding_traffic(shape: ModelShape, settings: PlanSettings, tokens: int) -> list[Traffic]:
    """Return the collectives of the embedding, sharded along d in every plan (T > 1)."""
    return FORMULAS[settings.plan].embedding(shape, settings, tokens)


def head_traffic(shape: ModelShape, settings: PlanSettings, tokens: int) -> list[Traffic]:
    """Return the collectives of the final norm and the vocabulary-parallel head (T > 1)."""
    rows = FORMULAS[settings.plan].head(shape, settings, tokens)
    if not settings.loss_parallel:
        rows = [*rows, forward("all_gather", [tokens * shape.vocab_size])]
    return merge(replace(row, scope="head") for row in rows)


def loss_traffic(
    shape: ModelShape, settings: PlanSettings, tokens: int, ranks: int
) -> list[Traffic]:
    """Return the scalars of the loss, which the head computes (T > 1).

    The log-sum-exp of every token is gathered from the ranks, in one call per chunk of tokens, and
    the loss is summed.

    Args:
        shape: Shape and family of the model.
        settings: The plan.
        tokens: Tokens n of the micro-batch.
        ranks: T.
    """
    if not settings.loss_parallel:
        return []
    size = _chunk(tokens, shape.dim)
    chunks = [ranks * min(size, tokens - start) for start in range(0, tokens, size)]
    return [
        forward("all_gather", chunks, "loss", scope="head"),
        forward("all_reduce", [1], "loss", scope="head"),
    ]


def _chunk(tokens: int, dim: int) -> int:
    """Tokens of a chunk of the loss: an eighth, from 512 to 4096; all up to 512 or d tokens."""
    if tokens <= dim or tokens <= 512:
        return tokens
    return min(max(-(-tokens // 8), 512), 4096)
