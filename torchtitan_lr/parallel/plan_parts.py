# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a tensor-parallel plan is: where the weights stand, and how its ranks apply them.

`Plan.styles` is the plan that `parallelize_module` applies: every parameter becomes a DTensor, also
one that stays whole. Activations stay plain local tensors: a plan reads weights by `local` and
calls the collectives itself, which spares DTensor's dispatch per operation and compiles as one
graph.

A replicated parameter gets its whole gradient on every rank during backward; nothing is summed
afterwards. If all ranks apply it to the same activations, each computes the whole gradient. If a
rank has its own (token shards, lanes, latents of r/T), its gradient is one term: the parameter goes
through `copy_to_ranks`, whose backward sums the terms. Norms do this in `normalize`, LaX's learned
gates in `Plan.gates`; no other parameter is replicated.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lr.collectives import TOKENS, Ranks, local
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import linear_loss
from torchtitan_lr.models.linears import LowRankLinear
from torchtitan_lr.models.one_device import OneDevice, OutputProjection
from torchtitan_lr.parallel.paired import copy_to_ranks, gather_from_ranks, scatter_to_ranks

# Placements of A (r, d_in) and B (d_out, r) of every linear; at full rank of the weights
# (d_out, d_in) of a pair: q, k, v and then o, or gate, up and then down.
Factors = tuple[Placement, Placement]
COLUMN_ROW: Factors = (Shard(0), Shard(1))  # Megatron-LM's pair; of A and B: latents of r/T
ROW_COLUMN: Factors = (Shard(1), Shard(0))  # of A and B: whole latents


@dataclass(frozen=True)
class TPSettings:
    """The tensor-parallel settings of `[parallelism]`; the fields are its `tp_*` keys."""

    plan: str = "auto"
    grouping: bool = True
    norm: Literal["online", "sync"] = "online"
    comm: Literal["all_reduce", "sequence"] = "all_reduce"
    # From other keys: whether CAAT-Net's backward sums in fp32 while it sends half precision.
    wide_sums: bool = False


class Placed(ParallelStyle):
    """Makes a module's parameters DTensors; what the ranks send for them is the plan's."""

    def __init__(self) -> None:
        super().__init__()
        self.placements: dict[str, Placement] = {}  # by the name of a parameter in the module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            parameter = module.get_parameter(name)
            # Every rank has the same full value (none on the meta device): no broadcast.
            sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))
        return module


class Plan(OneDevice):
    """A plan; this one's ends are for a residual stream that every rank has whole, or by tokens."""

    # If A is Shard(0), a rank holds r/T features of its latents, and sends these to the next stage.
    factors: ClassVar[Factors]
    low_rank: ClassVar[bool] = True  # whether it splits factorised linears, or dense ones
    lanes: ClassVar[bool] = False  # whether it is for models with CAAT-Net's lanes
    # Whether a rank holds d/T features of the residual stream and of the norms' weights, and sends
    # them to the next stage.
    shards_stream: ClassVar[bool] = False
    shards_heads: ClassVar[bool] = True  # whether a rank computes its own heads alone, or all
    choices: ClassVar[Set[str]] = frozenset()  # fields of `TPSettings` with an effect
    keeps_factors = False

    def __init__(self, args: LlamaArgs, settings: TPSettings, ranks: Ranks) -> None:
        self.args, self.settings, self.ranks = args, settings, ranks
        self.sequence = settings.comm == "sequence"  # whether tokens are sharded between groups

    @classmethod
    def placement(cls, name: str) -> Placement:
        """Return where a parameter stands, by its name in the model."""
        if name == "tok_embeddings.weight":
            return Shard(1)
        if name == "output.weight":
            return Shard(0)
        if name.endswith("norm.weight"):
            return Shard(0) if cls.shards_stream else Replicate()
        if name.endswith(".gate"):
            return Replicate()
        first, second = cls.factors
        ends = (".B.weight",) if cls.low_rank else (".wo.weight", ".w2.weight")
        return second if name.endswith(ends) else first

    @classmethod
    def styles(cls, parameters: Iterable[str]) -> dict[str, ParallelStyle]:
        """Return the plan of `parallelize_module`: a style for each module with parameters."""
        found: dict[str, Placed] = defaultdict(Placed)
        for name in parameters:
            module, _, parameter = name.rpartition(".")
            found[module].placements[parameter] = cls.placement(name)
        return {**found}

    @classmethod
    def widths(cls, args: LlamaArgs) -> dict[str, int]:
        """Return the widths of sharded dimensions, which T must divide, by name."""
        widths = {"dim": args.dim, "vocab_size": args.vocab_size}  # of embedding and head
        if cls.shards_heads:
            widths |= {"n_heads": args.n_heads, "n_kv_heads": args.kv_heads}
        # The ranks split d_in of A or d_out of B; at full rank, the width of a pair.
        outside = ROW_COLUMN if cls.low_rank else COLUMN_ROW
        if cls.factors[0] == outside[0] or cls.factors[1] == outside[1]:
            widths |= {"kv_dim": args.kv_dim, "ffn_dim": args.ffn_dim}
        if cls.low_rank and (cls.factors[0] == Shard(0) or cls.factors[1] == Shard(1)):
            widths |= {"rank_attention": args.rank_attention, "rank_ffn": args.rank_ffn}
        return widths

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look (b, s) up in weight (V, d/T), Shard(1): (b, s, d), or (b, s/T, d), Shard(1)."""
        x = gather_from_ranks(super().embed(tokens, embedding), self.ranks)  # (b, s, d)
        return scatter_to_ranks(x, self.ranks, TOKENS) if self.sequence else x

    def gates(self, linears: Sequence[LowRankLinear]) -> list[Tensor | None]:
        """Return LaX's gates; their gradients are summed if latents are sharded (r or tokens)."""
        gates = {i: local(m.gate) for i, m in enumerate(linears) if m.gate is not None}
        if gates and (self.sequence or self.factors[0] == Shard(0)):
            # One collective for the group.
            copies = copy_to_ranks(torch.cat(list(gates.values())), self.ranks).split(1)
            gates = dict(zip(gates, copies, strict=True))
        return [gates.get(i) for i in range(len(linears))]

    def head(
        self, x: Tensor, norm: nn.Module, output: OutputProjection, targets: Tensor | None
    ) -> Tensor:
        """Return logits (b, s, V), or with targets (b, s), replicated, the loss (`linear_loss`)."""
        # The weight is (V/T, d), Shard(0). The loss sends the log-sum-exps of every chunk of
        # tokens, and itself.
        weight = local(output.weight)
        x = self.normalized(x, norm)
        if targets is not None:
            return linear_loss(x, weight, targets, self.ranks)
        return gather_from_ranks(self.scores(x, weight), self.ranks)

    def normalized(self, x: Tensor, norm: Any) -> Tensor:
        """Return the normalized stream (b, s, d), replicated; its gradient is summed over ranks."""
        return copy_to_ranks(normalize(x, norm), self.ranks)


def normalize(x: Tensor, norm: Any, ranks: Ranks | None = None) -> Tensor:
    """Normalize whole features (..., d) with a replicated weight (d,)."""
    # The gradient of the kernel is that of this rank's stream. It is summed over ``ranks``, whose
    # streams differ (token shards, lanes); None is for a replicated stream.
    weight = local(norm.weight)
    if ranks is not None:
        weight = copy_to_ranks(weight, ranks)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
