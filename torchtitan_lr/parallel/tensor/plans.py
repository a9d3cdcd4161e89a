# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tensor-parallel plans: one function per strategy, from module name to `EdgeParallel` style.

A plan holds everything there is to say about a strategy: where each parameter lies and which edge
stands where. What the edges do is written in `btp`, `vanilla`, `megatron` and `ends`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.btp import BTPDownEdge, BTPUpEdge
from torchtitan_lr.parallel.tensor.btp_caat import BTPCaatDownEdge, BTPCaatUpEdge
from torchtitan_lr.parallel.tensor.caat import CaatColumnEdge, CaatEmbedEdge, CaatHead, CaatRowEdge
from torchtitan_lr.parallel.tensor.collectives import Ranks
from torchtitan_lr.parallel.tensor.ends import (
    GatheredEmbedEdge,
    ScatterHead,
    ShardedEmbedEdge,
    VocabParallelHead,
)
from torchtitan_lr.parallel.tensor.megatron import ColumnEdge, RowEdge
from torchtitan_lr.parallel.tensor.styles import (
    EdgeFactory,
    EdgeParallel,
    ShardedMixEdge,
    low_rank_placements,
)
from torchtitan_lr.parallel.tensor.vanilla import VanillaDownEdge, VanillaUpEdge

ATTENTION, FEED_FORWARD = "layers.*.attention", "layers.*.feed_forward"
NORMS = ("layers.*.attention_norm", "layers.*.ffn_norm")
LOW_RANK_LINEARS = (
    *(f"{ATTENTION}.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"{FEED_FORWARD}.{name}" for name in ("w1", "w2", "w3")),
)


@dataclass(frozen=True)
class TPSettings:
    """What `[parallelism]` says about tensor parallelism; the fields are its `tp_*` keys.

    Args:
        plan: Strategy; ``auto`` is ``btp`` for the low-rank families, ``megatron`` at full rank,
            ``caat`` at full rank with lanes.
        grouping: Whether q, k, v (and gate, up) share collectives and products.
        norm: BTP: whether the norm's statistic travels with the latents or before them.
        norm_stat: BTP, online norm: by an fp32 all-reduce of its own, or as a column of the
            latents' payload.
        comm: Whether sums leave every rank everything, or a shard of the tokens.
        head: BTP: the form of the head's backward.
        loss_parallel: Whether the loss works on sharded logits.
        wide_sums: CAAT-Net: whether backward's sums are fp32 behind a half-precision wire.
    """

    plan: Literal[
        "auto", "btp", "vanilla", "vanilla_replicated", "megatron", "caat", "btp_caat"
    ] = "auto"
    grouping: bool = True
    norm: Literal["online", "sync"] = "online"
    norm_stat: Literal["async", "column"] = "async"
    comm: Literal["all_reduce", "sequence"] = "all_reduce"
    head: Literal["plain", "scatter"] = "plain"
    loss_parallel: bool = True
    wide_sums: bool = False


Plan = dict[str, ParallelStyle]


def build_tp_plan(model: nn.Module, settings: TPSettings) -> Plan:
    """Build the plan of a model or of one pipeline stage.

    Args:
        model: A `LlamaModel`, perhaps without embedding or head.
        settings: With the plan resolved (not ``auto``).

    Returns:
        Styles by module name for ``parallelize_module``.
    """
    builders: dict[str, Callable[[bool, TPSettings], Plan]] = {
        "btp": btp_plan,
        "vanilla": vanilla_plan,
        "vanilla_replicated": vanilla_plan,
        "megatron": megatron_plan,
    }
    args: LlamaArgs = model.model_args  # type: ignore[assignment]
    if settings.plan == "caat":
        builders["caat"] = lambda mixes, settings: caat_plan(args, settings)
    if settings.plan == "btp_caat":
        builders["btp_caat"] = lambda mixes, settings: btp_caat_plan(args, settings)
    mixes = any(getattr(block, "carries_latents", False) for block in model.layers.values())  # type: ignore[operator]
    plan = builders[settings.plan](mixes, settings)
    stage = {name for name, child in model.named_children() if child is not None}
    return {name: style for name, style in plan.items() if name.split(".")[0] in stage}


def btp_plan(mixes: bool, settings: TPSettings) -> Plan:
    """Bottleneck-aware: stream Shard(-1), A row-parallel, B column-parallel.

    Args:
        mixes: Whether the blocks mix carried latents (LaX).
        settings: The settings.
    """
    sequence = settings.comm == "sequence"
    online, column = settings.norm == "online", settings.norm_stat == "column"
    down = _on_ranks(BTPDownEdge, settings.grouping, sequence, online, column)
    up = _on_ranks(BTPUpEdge, settings.grouping, sequence)
    plan = _low_rank_blocks(Shard(1), Shard(0), Shard(0))
    plan.update(
        _block_edges(
            attention={"down_qkv": down, "up_qkv": up, "down_o": down, "up_o": up},
            feed_forward={"down_gate_up": down, "up_gate_up": up, "down_down": down, "up_down": up},
            mix=_on_ranks(ShardedMixEdge, sequence) if mixes else None,
        )
    )
    scatter = settings.head == "scatter"
    head: EdgeFactory = (
        partial(ScatterHead, loss_parallel=settings.loss_parallel)
        if scatter
        else partial(VocabParallelHead, stream="features", loss_parallel=settings.loss_parallel)
    )
    embed: EdgeFactory = lambda mesh: ShardedEmbedEdge()  # noqa: E731
    plan.update(_ends(embed, head, Shard(0) if scatter else Replicate()))
    return plan


def vanilla_plan(mixes: bool, settings: TPSettings) -> Plan:
    """Vanilla: stream replicated, A column-parallel, B row-parallel; latents Shard(-1).

    Args:
        mixes: Whether the blocks mix carried latents (LaX).
        settings: ``plan`` chooses between sharded and replicated heads.
    """
    sharded_heads = settings.plan == "vanilla"
    down = _on_ranks(VanillaDownEdge, settings.grouping)
    down_o = _on_ranks(VanillaDownEdge, settings.grouping, sharded_heads)
    up = _on_ranks(VanillaUpEdge)
    up_qkv = _on_ranks(VanillaUpEdge, sharded_heads)
    plan = _low_rank_blocks(Shard(0), Shard(1), Replicate())
    plan.update(
        _block_edges(
            attention={"down_qkv": down, "up_qkv": up_qkv, "down_o": down_o, "up_o": up},
            feed_forward={"down_gate_up": down, "up_gate_up": up, "down_down": down, "up_down": up},
            mix=_on_ranks(ShardedMixEdge, True) if mixes else None,
        )
    )
    head = partial(VocabParallelHead, stream="replicated", loss_parallel=settings.loss_parallel)
    plan.update(_ends(_on_ranks(GatheredEmbedEdge), head, Replicate()))
    return plan


def megatron_plan(mixes: bool, settings: TPSettings) -> Plan:
    """Megatron-LM for the full-rank family: stream replicated, or Shard(1) for ``sequence``.

    Args:
        mixes: Unused; full-rank blocks carry nothing.
        settings: ``comm`` chooses the form.
    """
    sequence = settings.comm == "sequence"
    column, row = _on_ranks(ColumnEdge, sequence), _on_ranks(RowEdge, sequence)
    plan: Plan = {name: EdgeParallel({"weight": Replicate()}) for name in NORMS}
    for parent, columns, rows in (
        (ATTENTION, ("wq", "wk", "wv"), ("wo",)),
        (FEED_FORWARD, ("w1", "w3"), ("w2",)),
    ):
        plan.update({f"{parent}.{name}": EdgeParallel({"weight": Shard(0)}) for name in columns})
        plan.update({f"{parent}.{name}": EdgeParallel({"weight": Shard(1)}) for name in rows})
    plan.update(_block_edges({"qkv": column, "o": row}, {"gate_up": column, "down": row}, None))
    head = partial(
        VocabParallelHead,
        stream="tokens" if sequence else "replicated",
        loss_parallel=settings.loss_parallel,
    )
    plan.update(_ends(_on_ranks(GatheredEmbedEdge, sequence), head, Replicate()))
    return plan


def caat_plan(args: LlamaArgs, settings: TPSettings) -> Plan:
    """CAAT-Net: Megatron's placements, and a residual stream of its own for every lane.

    Args:
        args: The model's arguments; their lanes are dealt out to the ranks in order.
        settings: The settings.
    """
    wide = settings.wide_sums
    column, row = _on_ranks(CaatColumnEdge), _on_ranks(partial(CaatRowEdge, args=args, wide=wide))
    plan = megatron_plan(False, settings)
    plan.update(_block_edges({"qkv": column, "o": row}, {"gate_up": column, "down": row}, None))
    head = partial(CaatHead, loss_parallel=settings.loss_parallel)
    embed = _on_ranks(partial(CaatEmbedEdge, lanes=args.lanes, wide=wide))
    plan.update(_ends(embed, head, Replicate()))
    return plan


def btp_caat_plan(args: LlamaArgs, settings: TPSettings) -> Plan:
    """Experimental: BTP's placements, whose reductions share a part of the latents only.

    Args:
        args: The model's arguments; their lanes are dealt out to the ranks in order.
        settings: ``grouping`` as for BTP.
    """
    down = _on_ranks(
        partial(BTPCaatDownEdge, args=args, grouped=settings.grouping, wide=settings.wide_sums)
    )
    up = _on_ranks(BTPCaatUpEdge)
    plan = btp_plan(False, settings)
    plan.update(
        _block_edges(
            {"down_qkv": down, "up_qkv": up, "down_o": down, "up_o": up},
            {"down_gate_up": down, "up_gate_up": up, "down_down": down, "up_down": up},
            None,
        )
    )
    return plan


def _on_ranks(edge: Callable[..., nn.Module], *options: bool) -> EdgeFactory:
    """Return a factory of an edge that takes the ranks first."""

    def build(mesh: DeviceMesh) -> nn.Module:
        return edge(Ranks.of(mesh), *options)

    return build


def _low_rank_blocks(a: Shard, b: Shard, norm: Shard | Replicate) -> Plan:
    plan: Plan = {name: EdgeParallel({"weight": norm}) for name in NORMS}
    plan.update({name: EdgeParallel(low_rank_placements(a, b)) for name in LOW_RANK_LINEARS})
    return plan


def _block_edges(
    attention: dict[str, EdgeFactory],
    feed_forward: dict[str, EdgeFactory],
    mix: EdgeFactory | None,
) -> Plan:
    if mix is not None:
        attention, feed_forward = {**attention, "mix": mix}, {**feed_forward, "mix": mix}
    return {
        ATTENTION: EdgeParallel(edges=attention),
        FEED_FORWARD: EdgeParallel(edges=feed_forward),
    }


def _ends(embed: EdgeFactory, head: EdgeFactory, norm: Shard | Replicate) -> Plan:
    return {
        "tok_embeddings": EdgeParallel({"weight": Shard(1)}, {"embed": embed}),
        "norm": EdgeParallel({"weight": norm}),
        "output": EdgeParallel({"weight": Shard(0)}, {"head": head}),
    }
