# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a tensor-parallel plan consists of: placements of parameters, and edges.

Every parameter becomes a DTensor, also one that stays whole. Activations stay plain local tensors:
the edges read their weights by `local` and call the collectives themselves, which spares DTensor's
dispatch per operation and compiles as one graph.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.linears import Swiglu

EdgeFactory = Callable[[DeviceMesh], nn.Module]  # builds an edge on the tensor-parallel mesh

# Placements of A (r, d_in) and B (d_out, r) of every linear; at full rank of the weights
# (d_out, d_in) of a pair: q, k, v and then o, or gate, up and then down.
Factors = tuple[Placement, Placement]
COLUMN_ROW: Factors = (Shard(0), Shard(1))  # Megatron-LM's pair; of A and B: latents of r/T
ROW_COLUMN: Factors = (Shard(1), Shard(0))  # of A and B: whole latents

ATTENTION = "attention.wq", "attention.wk", "attention.wv", "attention.wo"
FEED_FORWARD = "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"  # gate, up, down


@dataclass(frozen=True)
class TPSettings:
    """The tensor-parallel settings of `[parallelism]`; the fields are its `tp_*` keys."""

    plan: str = "auto"
    grouping: bool = True
    norm: Literal["online", "sync"] = "online"
    comm: Literal["all_reduce", "sequence"] = "all_reduce"
    # From other keys: whether the loss works on sharded logits, and whether CAAT-Net's backward
    # sums in fp32 while it sends half precision.
    loss_parallel: bool = True
    wide_sums: bool = False

    @classmethod
    def read(cls, section: Any, **more: Any) -> "TPSettings":
        """Read the ``tp_*`` keys of a section; a key that the section lacks has its default."""
        names = [field.name for field in fields(cls) if hasattr(section, f"tp_{field.name}")]
        return cls(**{name: getattr(section, f"tp_{name}") for name in names}, **more)


@dataclass
class EdgeParallel(ParallelStyle):
    """Distributes the parameters of a module and replaces modules in it by edges."""

    placements: Mapping[str, Placement] = field(default_factory=dict)  # by parameter
    edges: Mapping[str, EdgeFactory] = field(default_factory=dict)  # by replaced module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = module.get_submodule(owner_name)
            parameter = getattr(owner, leaf)
            if parameter is not None:  # as the gate of a linear without one
                # Every rank has the same full value (none on the meta device): no broadcast.
                sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
                owner.register_parameter(leaf, nn.Parameter(sharded))
        for name, build in self.edges.items():
            module.get_submodule(name)  # raises for a name that no module has
            module.register_module(name, build(device_mesh))
        return module


Styles = dict[str, EdgeParallel]  # by module; ``*`` stands for every block


@dataclass(frozen=True)
class Plan:
    """A tensor-parallel plan: its function, and what must be known without a model."""

    split: Callable[[LlamaArgs, TPSettings], Styles]
    # Of the linears. If A is Shard(0), a rank holds r/T features of its latents, and sends these
    # to the next stage.
    attention: Factors
    feed_forward: Factors
    low_rank: bool = True  # whether it splits factorised linears, or dense ones
    lanes: bool = False  # whether it is for models with CAAT-Net's lanes
    # Whether a rank holds d/T features of the residual stream and of the norms' weights in the
    # blocks, and sends them to the next stage.
    shards_stream: bool = False
    shards_heads: bool = True  # whether a rank computes its share of the heads, or all heads
    choices: Set[str] = frozenset()  # fields of `TPSettings` with an effect

    def widths(self, args: LlamaArgs) -> dict[str, int]:
        """Return the widths of sharded dimensions, which T must divide, by name."""
        widths: dict[str, int] = {}
        if self.shards_heads:
            widths |= {"n_heads": args.n_heads, "n_kv_heads": args.kv_heads}
        widths["dim"] = args.dim  # of the embedding, in every plan
        if self._shards_outside(self.attention):
            widths["kv_dim"] = args.kv_dim
        if self._shards_outside(self.feed_forward):
            widths["ffn_dim"] = args.ffn_dim
        widths["vocab_size"] = args.vocab_size  # of the head, in every plan
        if self._shards_rank(self.attention):
            widths["rank_attention"] = args.rank_attention
        if self._shards_rank(self.feed_forward):
            widths["rank_ffn"] = args.rank_ffn
        return widths

    def _shards_outside(self, factors: Factors) -> bool:
        """Whether the ranks split d_in of A or d_out of B; at full rank, the width of a pair."""
        first, second = ROW_COLUMN if self.low_rank else COLUMN_ROW
        return factors[0] == first or factors[1] == second

    def _shards_rank(self, factors: Factors) -> bool:
        """Whether the ranks split r of A or of B."""
        return self.low_rank and (factors[0] == Shard(0) or factors[1] == Shard(1))


def on_ranks(edge: Callable[..., nn.Module], **options: Any) -> EdgeFactory:
    """Return a factory of an edge, given its options."""
    return lambda mesh: edge(Ranks.of(mesh), **options)


def low_rank_blocks(
    args: LlamaArgs, plan: Plan, down: EdgeFactory, up: EdgeFactory, mix: EdgeFactory | None = None
) -> Styles:
    """Return placements and edges of low-rank blocks: every A and B, and the norms' weights."""
    # ``down`` applies A of a group, ``up`` σ and B; ``mix`` is for families with carried latents.
    group = {"down": down, "up": up}
    if mix is not None and args.model_family.carries_latents:
        group["mix"] = mix
    norm = {"weight": Shard(0) if plan.shards_stream else Replicate()}
    styles: Styles = {
        "layers.*.attention_norm": EdgeParallel(norm),
        "layers.*.attention.qkv": EdgeParallel(edges=group),
        "layers.*.attention.o": EdgeParallel(edges=group),
        "layers.*.ffn_norm": EdgeParallel(norm),
        "layers.*.feed_forward.gate_up": EdgeParallel(edges=group),
        # The edge of `out` has σ(gate) · up as one input; `SwigluFactors` would pass it two.
        "layers.*.feed_forward": EdgeParallel(edges={"swiglu": lambda _: Swiglu(args.outer_silu)}),
        "layers.*.feed_forward.out": EdgeParallel(edges=group),
    }
    for names, (a, b) in ((ATTENTION, plan.attention), (FEED_FORWARD, plan.feed_forward)):
        factors: dict[str, Placement] = {"A.weight": a, "B.weight": b, "gate": Replicate()}
        for name in names:
            styles[f"layers.*.{name}"] = EdgeParallel(factors)
    return styles


def dense_blocks(plan: Plan, first: EdgeFactory, second: EdgeFactory) -> Styles:
    """Return placements and edges of full-rank blocks, which are two pairs of linears."""
    # ``first`` is the edge of q, k, v and of gate, up; ``second`` that of o and of down.
    styles: Styles = {
        "layers.*.attention_norm": EdgeParallel({"weight": Replicate()}),
        "layers.*.attention.qkv": EdgeParallel(edges={"product": first}),
        "layers.*.attention.o": EdgeParallel(edges={"product": second}),
        "layers.*.ffn_norm": EdgeParallel({"weight": Replicate()}),
        "layers.*.feed_forward.gate_up": EdgeParallel(edges={"product": first}),
        "layers.*.feed_forward.out": EdgeParallel(edges={"product": second}),
    }
    for names, (opening, closing) in (
        (ATTENTION, plan.attention),
        (FEED_FORWARD, plan.feed_forward),
    ):
        for name in names:
            placement = closing if name == names[-1] else opening  # o, down
            styles[f"layers.*.{name}"] = EdgeParallel({"weight": placement})
    return styles


def model_ends(
    embed: EdgeFactory,
    head: EdgeFactory,
    norm: Placement = Replicate(),  # noqa: B008
) -> Styles:
    """Return both ends of the model: the embedding sharded along d, the head along V."""
    # ``norm`` is the placement of the final norm's weight.
    return {
        "tok_embeddings": EdgeParallel({"weight": Shard(1)}, {"embed": embed}),
        "norm": EdgeParallel({"weight": norm}),
        "output": EdgeParallel({"weight": Shard(0)}, {"head": head}),
    }
