# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of generation over tensor-parallel ranks, in closed form.

A pass of generation is training's forward over the new tokens, with two differences: the head reads
one position per row, and no loss follows. Instead the ranks exchange the best candidates of their
parts of the vocabulary, a score and an id each.
"""

from dataclasses import replace

from torchtitan_lr.costs.messages import Traffic, merge
from torchtitan_lr.costs.tp_messages import part_traffic
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.plan_parts import TPSettings

CANDIDATE_BYTES = 8
"""Scores and ids are sent in fp64, which holds both exactly."""


def pass_traffic(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, rows: int, tokens: int
) -> list[Traffic]:
    """Return the tensor-parallel collectives of one pass, without the exchange of candidates.

    Args:
        shape: Shape and family of the model.
        settings: The plan, with ``loss_parallel``: logits stay sharded.
        tp_degree: Ranks T; at 1 there is nothing to send.
        rows: Rows of the batch.
        tokens: New tokens per row: those of the prompt, then 1.

    Returns:
        Rows for the embedding, every block and the head.
    """
    if tp_degree == 1:
        return []
    parts = part_traffic(shape, settings, rows * tokens, tp_degree)
    parts["head"] = part_traffic(shape, settings, rows, tp_degree)["head"]
    found = [replace(row, scope=end) for end in ("embedding", "head") for row in parts[end]]
    for i in range(shape.n_layers):
        block = parts["block"] + (parts["gates"] if i else [])
        found += [replace(row, scope=f"block {i}") for row in block]
    return merge(row for row in found if row.pass_ == "forward")


def pass_bytes(
    shape: LlamaArgs,
    settings: TPSettings,
    tp_degree: int,
    rows: int,
    tokens: int,
    candidates: int,
    element_size: int,
) -> int:
    """Return the bytes of one pass on a rank, as the ledger counts them.

    Args:
        shape: Shape and family of the model.
        settings: The plan, with ``loss_parallel``.
        tp_degree: Ranks T.
        rows: Rows of the batch.
        tokens: New tokens per row.
        candidates: Candidates per row and rank: 1 for greedy tokens, k for top-k.
        element_size: Bytes of an activation's element; statistics have at least 4.
    """
    if tp_degree == 1:
        return 0
    total = rows * 2 * candidates * tp_degree * CANDIDATE_BYTES
    for row in pass_traffic(shape, settings, tp_degree, rows, tokens):
        wide = row.role == "statistic"
        total += row.elements * (max(4, element_size) if wide else element_size)
    return total
