# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a plan changes a module: parameters become DTensors, edges are exchanged.

Activations stay plain local tensors throughout. The edges read their weights by `local` and call
the collectives themselves, which spares DTensor's dispatch per operation and compiles as one graph.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lr.models.layers import LowRankLinear
from torchtitan_lr.parallel.tensor.collectives import Ranks, copy_to_ranks

EdgeFactory = Callable[[DeviceMesh], nn.Module]
"""Builds the edge of a plan, given the tensor-parallel mesh."""


class EdgeParallel(ParallelStyle):
    """Distribute the parameters of a module and replace its edges.

    Args:
        placements: Placement by parameter name, relative to the module. A name that the module
            does not have (the gate of a linear without one) is skipped.
        edges: The new edge by the edge's name in the module.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement] | None = None,
        edges: Mapping[str, EdgeFactory] | None = None,
    ) -> None:
        super().__init__()
        self.placements = dict(placements or {})
        self.edges = dict(edges or {})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = module.get_submodule(owner_name)
            parameter = getattr(owner, leaf)
            if parameter is not None:
                # Every rank has the same full value (none on the meta device): no broadcast.
                sharded = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
                owner.register_parameter(leaf, nn.Parameter(sharded))
        for name, build in self.edges.items():
            module.get_submodule(name)  # raises for a name that is no edge
            module.register_module(name, build(device_mesh))
        return module


class Edge(nn.Module):
    """An edge of a plan: no parameters, and the ranks over which its collectives run."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks


class ShardedMixEdge(Edge):
    """LaX's addition on replicated or sharded latents; it is local in both cases.

    Args:
        ranks: The tensor-parallel ranks.
        sharded: Whether a rank holds only a part of each latent, along r or along the tokens.
            Then the gradient of a learned gate is a sum over the ranks.
    """

    def __init__(self, ranks: Ranks, sharded: bool) -> None:
        super().__init__(ranks)
        self.sharded = sharded

    def forward(
        self,
        latents: Sequence[Tensor],
        carried: Sequence[Tensor] | None,
        linears: Sequence[LowRankLinear],
    ) -> list[Tensor]:
        """Compute A_i x_i + g · A_(i-1) x_(i-1).

        Args:
            latents: This block's latents, one per linear, in the plan's layout.
            carried: The previous block's latents, in the same layout; None in the first block.
            linears: The group, with the learned gates g (1,), Replicate, if there are any.

        Returns:
            The mixed latents, in the same layout.
        """
        if carried is None:
            return list(latents)
        gates = [local(linear.gate) for linear in linears if linear.gate is not None]
        if not gates:
            return [latent + previous for latent, previous in zip(latents, carried, strict=True)]
        gate = torch.cat(gates)
        if self.sharded:
            gate = copy_to_ranks(gate, self.ranks)
        triples = zip(latents, gate.split(1), carried, strict=True)
        return [latent + g * previous for latent, g, previous in triples]


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; its gradient is this rank's part too."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def replicated_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Normalize a replicated x (b, s, d) with a replicated weight (d,)."""
    return F.rms_norm(x, norm.normalized_shape, local(norm.weight), norm.eps)


def token_sharded_norm(x: Tensor, norm: nn.RMSNorm, ranks: Ranks) -> Tensor:
    """Normalize token shards (b, s/T, d); the weight's gradient is summed over the ranks."""
    weight = copy_to_ranks(local(norm.weight), ranks)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


def epsilon(norm: nn.RMSNorm) -> float:
    """Return ε of a norm; torch's default if it was built without one."""
    return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps


def low_rank_placements(a: Placement, b: Placement) -> dict[str, Placement]:
    """Return the placements of the parameters of a `LowRankLinear`."""
    return {"A.weight": a, "B.weight": b, "gate": Replicate()}
