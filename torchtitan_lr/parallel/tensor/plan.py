# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a tensor-parallel plan is: placements and edges by module name, and what it refuses.

Each plan is one class, in the file of its edges: `btp`, `vanilla`, `megatron`, `caat`, `btp_caat`.
What it sends and keeps is stated independently by the class of its name in `formulas.plans`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.collectives import Ranks
from torchtitan_lr.parallel.tensor.styles import EdgeFactory, EdgeParallel, low_rank_placements

ATTENTION, FEED_FORWARD = "layers.*.attention", "layers.*.feed_forward"
NORMS = ("layers.*.attention_norm", "layers.*.ffn_norm")
LOW_RANK_LINEARS = (
    *(f"{ATTENTION}.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"{FEED_FORWARD}.{name}" for name in ("w1", "w2", "w3")),
)

Styles = dict[str, ParallelStyle]
"""Styles by module name, for ``parallelize_module``."""


@dataclass(frozen=True)
class TPSettings:
    """What `[parallelism]` says about tensor parallelism; the fields are its `tp_*` keys.

    Args:
        plan: Name of the plan; ``auto`` is ``btp`` for the low-rank families, ``megatron`` at full
            rank, ``caat`` at full rank with lanes.
        grouping: Whether q, k, v (and gate, up) share collectives and products.
        norm: BTP: whether the norm's statistic travels with the latents or before them.
        norm_stat: BTP, online norm: by an fp32 all-reduce of its own, or as a column of the
            latents' payload.
        comm: Whether sums leave every rank everything, or a shard of the tokens.
        head: BTP: the form of the head's backward.
        loss_parallel: Whether the loss works on sharded logits.
        wide_sums: CAAT-Net: whether backward's sums are fp32 behind a half-precision wire.
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
    """One way to split a model over T ranks; a subclass is a plan.

    Attributes:
        name: The value of ``parallelism.tp_plan``.
        low_rank: Whether it splits factorised linears, or dense ones.
        lanes: Whether it is for models with CAAT-Net's lanes.
        experimental: Whether it must be named, since ``auto`` never chooses it.
        shards_stream: Whether a rank sends d/T features of the residual stream to the next stage.
        shards_latents: Whether it sends r/T features of each of LaX's latents.
        choices: Fields of `TPSettings` in which it has a choice; others keep their defaults.
    """

    name: str
    low_rank: bool = True
    lanes: bool = False
    experimental: bool = False
    shards_stream: bool = False
    shards_latents: bool = False
    choices: frozenset[str] = frozenset()

    def styles(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return placements and edges of a whole model.

        Args:
            args: The model's arguments.
            settings: Checked by `check`.
        """
        raise NotImplementedError

    def is_default(self, args: LlamaArgs) -> bool:
        """Say whether ``auto`` chooses this plan for a model."""
        return False

    def widths(self, args: LlamaArgs) -> dict[str, int]:
        """Return the widths of the model that T must divide, by name."""
        return {
            "n_heads": args.n_heads,
            "n_kv_heads": args.kv_heads,
            "dim": args.dim,
            "ffn_dim": args.ffn_dim,
            "vocab_size": args.vocab_size,
        }

    def check(self, settings: TPSettings) -> None:
        """Refuse settings without effect under this plan.

        Args:
            settings: With this plan.

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
"""Plans by name; `plans` registers those of this package."""


def register_plan(plan: TensorParallelPlan) -> None:
    """Make a plan known under its name, also as a value of ``parallelism.tp_plan``.

    Args:
        plan: The plan; the formulas know its traffic by `formulas.plans.registry`.
    """
    PLANS[plan.name] = plan
    if plan.name not in TP_PLANS:
        TP_PLANS.append(plan.name)


def on_ranks(edge: Callable[..., nn.Module], *options: bool) -> EdgeFactory:
    """Return a factory of an edge that takes the ranks first.

    Args:
        edge: The edge's class.
        *options: What it takes after the ranks.
    """

    def build(mesh: DeviceMesh) -> nn.Module:
        return edge(Ranks.of(mesh), *options)

    return build


def low_rank_blocks(a: Shard, b: Shard, norm: Shard | Replicate) -> Styles:
    """Return the placements of a low-rank block: every A, every B, and the norms' weights."""
    plan: Styles = {name: EdgeParallel({"weight": norm}) for name in NORMS}
    plan.update({name: EdgeParallel(low_rank_placements(a, b)) for name in LOW_RANK_LINEARS})
    return plan


def block_edges(
    attention: dict[str, EdgeFactory],
    feed_forward: dict[str, EdgeFactory],
    mix: EdgeFactory | None = None,
) -> Styles:
    """Return the edges of a block.

    Args:
        attention: Attention's, by name.
        feed_forward: The feed-forward's, by name.
        mix: LaX's in both; None in the other families.
    """
    if mix is not None:
        attention, feed_forward = {**attention, "mix": mix}, {**feed_forward, "mix": mix}
    return {
        ATTENTION: EdgeParallel(edges=attention),
        FEED_FORWARD: EdgeParallel(edges=feed_forward),
    }


def model_ends(embed: EdgeFactory, head: EdgeFactory, norm: Shard | Replicate) -> Styles:
    """Return both ends of the model: the embedding sharded along d, the head along V.

    Args:
        embed: The embedding's edge.
        head: The head's edge, which applies the final norm.
        norm: Placement of the final norm's weight.
    """
    return {
        "tok_embeddings": EdgeParallel({"weight": Shard(1)}, {"embed": embed}),
        "norm": EdgeParallel({"weight": norm}),
        "output": EdgeParallel({"weight": Shard(0)}, {"head": head}),
    }
