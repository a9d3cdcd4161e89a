# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plans from outside the package that split the feed-forward alone, low-rank and at full rank.

Every rank has the whole of attention and repeats it. The feed-forward is split as by ``vanilla``,
and at full rank as by ``megatron``. A run names this module by ``experimental.custom_import``.
"""

from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.costs.messages import backward, forward
from torchtitan_lr.costs.tp_messages import FORMULAS, PlanFormula
from torchtitan_lr.parallel.edge import (
    EmbedEdge,
    HeadEdge,
    MixEdge,
    WholeDense,
    WholeDown,
    WholeUp,
)
from torchtitan_lr.parallel.megatron import ColumnEdge, RowEdge, VanillaDown, VanillaUp
from torchtitan_lr.parallel.plan_parts import (
    COLUMN_ROW,
    WHOLE,
    Plan,
    dense_blocks,
    low_rank_blocks,
    model_ends,
    on_ranks,
)
from torchtitan_lr.parallel.plans import PLANS


def attention_of(whole, split):
    """Return the styles of ``split``, with attention's from ``whole``."""
    attention = {name: style for name, style in whole.items() if ".attention" in name}
    return split | attention


def ends(settings):
    """The stream is replicated, as under ``vanilla`` and ``megatron``."""
    head = on_ranks(HeadEdge, loss_parallel=settings.loss_parallel)
    return model_ends(on_ranks(EmbedEdge), head)


def mixed(args, settings):
    mix = on_ranks(MixEdge, sharded=False)  # whole latents
    whole = low_rank_blocks(args, MIXED, on_ranks(WholeDown), on_ranks(WholeUp), mix)
    down, up = on_ranks(VanillaDown, grouping=settings.grouping), on_ranks(VanillaUp)
    mix = on_ranks(MixEdge, sharded=True)  # r/T features of each latent
    split = low_rank_blocks(args, MIXED, down, up, mix)
    return attention_of(whole, split) | ends(settings)


def mixed_dense(args, settings):
    whole = dense_blocks(MIXED_DENSE, on_ranks(WholeDense), on_ranks(WholeDense))
    split = dense_blocks(MIXED_DENSE, on_ranks(ColumnEdge), on_ranks(RowEdge))
    return attention_of(whole, split) | ends(settings)


def block_traffic(shape, settings, n, ranks):
    d, f = n * shape.dim, n * shape.ffn_dim
    if shape.family == "full":
        block = [forward("all_reduce", [d]), backward("all_reduce", [d])]
    else:
        inputs = [d, f] if settings.grouping else [d, d, f]  # of gate, up; of down
        block = [forward("all_reduce", [f, f, d]), backward("all_reduce", inputs)]
    embedding, head = [forward("all_gather", [d])], [backward("all_reduce", [d])]
    return {"embedding": embedding, "block": block, "head": head}


MIXED = Plan(mixed, WHOLE, COLUMN_ROW, shards_heads=False, choices={"grouping"})
MIXED_DENSE = Plan(mixed_dense, WHOLE, COLUMN_ROW, shards_heads=False, low_rank=False)
FORMULA = PlanFormula(block_traffic, (None, None), (0, 1), shards_heads=False)
for name, plan in (("mixed", MIXED), ("mixed_dense", MIXED_DENSE)):
    PLANS[name] = plan
    TP_PLANS.append(name)
    FORMULAS[name] = FORMULA
