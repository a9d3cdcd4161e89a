# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The base class of tensor-parallel plans: placements and edges by module name, and checks.

Each plan is one class, in the file of its edges: `btp`, `vanilla`, `megatron`, `caat`, `btp_caat`.
The class of the same name in `formulas.plans` states its traffic and saved bytes independently.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan_lr.config.schema import BUILT_IN_PLANS, TP_PLANS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.collectives import Ranks
from torchtitan_lr.parallel.tensor.ends import GatheredEmbedEdge, VocabParallelHead
from torchtitan_lr.parallel.tensor.styles import EdgeFactory, EdgeParallel, low_rank_placements

ATTENTION, FEED_FORWARD = "layers.*.attention", "layers.*.feed_forward"
NORMS = ("layers.*.attention_norm", "layers.*.ffn_norm")
LINEARS = (
    *(f"{ATTENTION}.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"{FEED_FORWARD}.{name}" for name in ("w1", "w2", "w3")),
)

Styles = dict[str, ParallelStyle]
"""Styles by module name, for ``parallelize_module``."""


@dataclass(frozen=True)
class TPSettings:
    """The tensor-parallel settings of `[parallelism]`; the fields are its `tp_*` keys.

    Args:
        plan: Name of the plan; ``auto`` is ``btp`` for the low-rank families, ``megatron`` at full
            rank, ``caat`` at full rank with lanes.
        grouping: Whether q, k, v (and gate, up) share collectives and products.
        norm: BTP: whether the norm's statistic is reduced with the latents or before them.
        norm_stat: BTP, online norm: its own all-reduce in fp32, or a column of the latents'
            message.
        comm: Whether sums are all-reduced, or reduce-scattered over the tokens.
        head: BTP: the form of the head's backward.
        loss_parallel: Whether the loss works on sharded logits.
        wide_sums: CAAT-Net: whether backward sums in fp32 while it sends half precision.
    """

    plan: str = "auto"
    grouping: bool = True
    norm: Literal["online", "sync"] = "online"
    norm_stat: Literal["async", "column"] = "async"
    comm: Literal["all_reduce", "sequence"] = "all_reduce"
    head: Literal["plain", "scatter"] = "plain"
    loss_parallel: bool = True
    wide_sums: bool = False


class TensorParallelPlan:
    """A split of a model over T ranks; each subclass is a plan.

    Attributes:
        name: The value of ``parallelism.tp_plan``.
        low_rank: Whether it splits factorised linears, or dense ones.
        lanes: Whether it is for models with CAAT-Net's lanes.
        experimental: Whether it must be named: ``auto`` never chooses it.
        factors: Placements of A and B, for factorised linears.
        shards_stream: Whether a rank holds d/T features of the residual stream and sends them to
            the next stage. The norms' weights in the blocks are sharded in the same way.
        shards_latents: Whether it sends r/T features of each of LaX's latents.
        shards_heads: Whether a rank computes its share of the heads, or all heads.
        choices: Fields of `TPSettings` with an effect; others must keep their defaults.
    """

    name: str
    low_rank: bool = True
    lanes: bool = False
    experimental: bool = False
    factors: tuple[Shard, Shard] = (Shard(1), Shard(0))
    shards_stream: bool = False
    shards_latents: bool = False
    shards_heads: bool = True
    choices: frozenset[str] = frozenset()

    def styles(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return placements and edges of a whole model."""
        raise NotImplementedError

    def is_default(self, args: LlamaArgs) -> bool:
        """Return whether ``auto`` chooses this plan for a model."""
        return False

    def widths(self, args: LlamaArgs) -> dict[str, int]:
        """Return the widths that T must divide, by name: those of sharded dimensions."""
        a, b = self.factors
        widths: dict[str, int] = {}
        if self.shards_heads:
            widths |= {"n_heads": args.n_heads, "n_kv_heads": args.kv_heads}
        widths["dim"] = args.dim  # of the embedding, in every plan
        if a == Shard(1) or b == Shard(0):
            widths |= {"kv_dim": args.kv_dim, "ffn_dim": args.ffn_dim}
        widths["vocab_size"] = args.vocab_size  # of the head, in every plan
        if a == Shard(0) or b == Shard(1):
            widths |= {"rank_attention": args.rank_attention, "rank_ffn": args.rank_ffn}
        return widths

    def low_rank_blocks(self, edges: Styles) -> Styles:
        """Return placements and edges of low-rank blocks: every A and B, and the norms' weights."""
        norm = Shard(0) if self.shards_stream else Replicate()
        styles: Styles = {name: EdgeParallel({"weight": norm}) for name in NORMS}
        styles |= {name: EdgeParallel(low_rank_placements(*self.factors)) for name in LINEARS}
        return styles | edges

    def check(self, settings: TPSettings) -> None:
        """Raise for settings without effect under this plan.

        Raises:
            ConfigError: A setting differs from its default and the plan has no such choice.
        """
        defaults = {field.name: field.default for field in fields(TPSettings)}
        for key in ("norm", "norm_stat", "head"):
            if key not in self.choices and getattr(settings, key) != defaults[key]:
                others = " or ".join(plan.name for plan in PLANS.values() if key in plan.choices)
                want = f"{defaults[key]!r}: only the plan {others} has a choice"
                raise ConfigError(f"parallelism.tp_{key}", getattr(settings, key), want)
        if settings.norm == "sync" and settings.norm_stat != defaults["norm_stat"]:
            want = f"{defaults['norm_stat']!r} unless tp_norm is 'online'"
            raise ConfigError("parallelism.tp_norm_stat", settings.norm_stat, want)
        if "comm" not in self.choices and settings.comm == "sequence":
            want = f"'all_reduce' for the plan {self.name}"
            raise ConfigError("parallelism.tp_comm", settings.comm, want)
        if "grouping" not in self.choices and not settings.grouping:
            want = (
                f"true for the plan {self.name}, whose linears always share their input's "
                "collective"
            )
            raise ConfigError("parallelism.tp_grouping", settings.grouping, want)


PLANS: dict[str, TensorParallelPlan] = {}
"""Plans by name; `plans` adds those of this package."""


def register_plan(plan: TensorParallelPlan) -> None:
    """Register a plan from outside the package, also as a value of ``parallelism.tp_plan``.

    Raises:
        ValueError: A plan of this package has the name.
    """
    if plan.name in ("auto", *BUILT_IN_PLANS):
        raise ValueError(f"the name {plan.name!r} of a tensor-parallel plan is taken")
    PLANS[plan.name] = plan
    if plan.name not in TP_PLANS:
        TP_PLANS.append(plan.name)


def on_ranks(edge: Callable[..., nn.Module], *options: bool) -> EdgeFactory:
    """Return a factory of an edge that takes the ranks first."""

    def build(mesh: DeviceMesh) -> nn.Module:
        return edge(Ranks.of(mesh), *options)

    return build


def low_rank_edges(
    down: EdgeFactory, up: EdgeFactory, mix: EdgeFactory | None = None, **attention: EdgeFactory
) -> Styles:
    """Return the edges of a low-rank block.

    Args:
        down: The edge that ends a chunk: applies A of a group.
        up: The edge that starts a chunk: applies B of a group.
        mix: LaX's edge; None for other families.
        **attention: Edges of attention that differ from these, by name.
    """
    lax = {} if mix is None else {"mix": mix}
    of_attention = {"down_qkv": down, "up_qkv": up, "down_o": down, "up_o": up}
    of_ffn = {"down_gate_up": down, "up_gate_up": up, "down_down": down, "up_down": up}
    return {
        ATTENTION: EdgeParallel(edges=of_attention | attention | lax),
        FEED_FORWARD: EdgeParallel(edges=of_ffn | lax),
    }


def dense_blocks(column: EdgeFactory, row: EdgeFactory) -> Styles:
    """Return placements and edges of a full-rank block: column-, then row-parallel linears.

    Args:
        column: The edge of q, k, v and of gate, up; weights Shard(0).
        row: The edge of o and of down; weights Shard(1).
    """
    styles: Styles = {name: EdgeParallel({"weight": Replicate()}) for name in NORMS}
    styles[ATTENTION] = EdgeParallel(edges={"qkv": column, "o": row})
    styles[FEED_FORWARD] = EdgeParallel(edges={"gate_up": column, "down": row})
    for name in LINEARS:
        dim = 1 if name.endswith(("wo", "w2")) else 0
        styles[name] = EdgeParallel({"weight": Shard(dim)})
    return styles


def model_ends(
    settings: TPSettings,
    embed: EdgeFactory | None = None,
    head: Callable[..., nn.Module] = VocabParallelHead,
    norm: Shard | Replicate | None = None,
) -> Styles:
    """Return both ends of the model: the embedding sharded along d, the head along V.

    Args:
        settings: The plan's settings.
        embed: The embedding's edge; by default the stream is gathered on every rank.
        head: The head's edge, of a mesh and ``loss_parallel``, which applies the final norm; by
            default the edge for a replicated stream.
        norm: Placement of the final norm's weight; Replicate by default.
    """
    build_head: EdgeFactory = partial(head, loss_parallel=settings.loss_parallel)
    return {
        "tok_embeddings": EdgeParallel(
            {"weight": Shard(1)}, {"embed": embed or on_ranks(GatheredEmbedEdge)}
        ),
        "norm": EdgeParallel({"weight": norm or Replicate()}),
        "output": EdgeParallel({"weight": Shard(0)}, {"head": build_head}),
    }
