# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What crosses a boundary between pipeline stages, in closed form.

BOOST counts d elements per token and boundary. Under bottleneck-aware tensor parallelism a rank
holds and sends d/T elements of the residual stream. LaX also sends the seven latents that the next
block mixes in.
"""

from torchtitan_lr.costs.tp_messages import FORMULAS
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.plan_parts import TPSettings


def boundary_elements(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, seq_len: int, blocks_before: int
) -> int:
    """Return the elements that one rank sends over one boundary for one sequence.

    The stream has sd elements, Gsd with G lanes at full rank; LaX's latents have s(4r + 3r') with
    the ranks r of attention and r' of the feed-forward. A rank that holds a replica of either sends
    all of it; a rank that holds a shard sends 1/T of it:

    ===========================  =======  =================
    plan                         stream   latents
    ===========================  =======  =================
    lanes at full rank           shard    none
    any, ``comm = "sequence"``   shard    shard
    btp                          shard    replica
    vanilla, megatron            replica  shard
    ===========================  =======  =================
    """
    full_rank_lanes = shape.family == "full" and shape.lanes > 1
    stream = seq_len * shape.dim * (shape.lanes if full_rank_lanes else 1)
    attention, feed_forward = 4 * seq_len * shape.rank_attention, 3 * seq_len * shape.rank_ffn
    if shape.family != "lax" or blocks_before in (0, shape.n_layers):
        attention = feed_forward = 0
    if tp_degree == 1:
        return stream + attention + feed_forward
    formula, by_tokens = FORMULAS[settings.plan], settings.comm == "sequence"
    if formula.shards_stream or by_tokens or full_rank_lanes:
        stream //= tp_degree
    if formula.attention[0] == 0 or by_tokens:
        attention //= tp_degree
    if formula.feed_forward[0] == 0 or by_tokens:
        feed_forward //= tp_degree
    return stream + attention + feed_forward
