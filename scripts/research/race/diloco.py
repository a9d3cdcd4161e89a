# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512) by torchft's `DiLoCo`.

Each replica trains alone with AdamW. Every H steps the replicas average the changes of their
weights, and an outer optimizer, SGD with Nesterov momentum, applies the mean. Streaming DiLoCo does
so fragment after fragment, each every H steps, and lets a sum run beside a step. At its end the
replicas differ: a loss is the mean of their own, each on its share of the rows. A checkpoint would
mix their weights, and is refused. The paper's replicas clip alone; here all clip by one norm, the
root mean square of their own, since a step has one norm.

torchft's `Manager` asks a server which replicas are alive before every sum. Here their number is
fixed, so `FixedReplicas` stands in its place, on the run's own process group.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.numerics import scale_
from torchtitan_lr.optim.entries import Function, build_optimizers
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""DiLoCo's outer optimizer (section 3.1), here of both."""

STREAMING: dict[str, Any] = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
"""Streaming DiLoCo's τ, the steps beside which a sum runs, and α, the share of the local weights
after it (section 2.3)."""


class FixedReplicas:
    """What `DiLoCo` asks of torchft's `Manager`, for replicas that neither come nor go.

    Args:
        group: The replicas.
    """

    _use_async_quorum = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._syncs = group, 0
        # The replicas are known, and no other one reads the weights.
        self.start_quorum = self.register_state_dict_fn = lambda *_: None
        self.allow_state_dict_read = self.disallow_state_dict_read = lambda: None

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        """Start the mean of a tensor over the replicas, in place."""
        tensor /= self._group.size()  # gloo has no mean
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def current_step(self) -> int:
        """Return the number of syncs so far, which chooses the next fragment."""
        return self._syncs

    def should_commit(self) -> bool:
        """End a sync; it counts."""
        self._syncs += 1
        return True


class LocalGradients(StoredGradients):
    """Gradients of a replica's own batch.

    The loss is divided by the tokens of all replicas; a replica's own mean is so many times larger.

    Args:
        model_parts: The model; pipelines are not supported.
        replicas: Their number.
    """

    def __init__(self, model_parts: list[nn.Module], replicas: int) -> None:
        super().__init__(model_parts, None)
        self._replicas = torch.tensor(float(replicas), dtype=torch.float64)

    @torch.no_grad()
    def finish_sums(self) -> Tensor:
        """Scale the gradients; return this rank's share of the mean of the squared norms."""
        scale_(map(local_part, self._gradients()), self._replicas)
        return super().finish_sums()


def fragments_of(model: Any, count: int) -> list[nn.Module]:
    """Split a model into fragments of consecutive blocks; the ends belong to the outer ones.

    Fragments differ by at most a block. A model has at least one for each.
    """
    blocks = list(model.layers.children())
    bounds = [len(blocks) * i // count for i in range(count + 1)]
    parts = [blocks[start:end] for start, end in pairwise(bounds)]
    parts[0].insert(0, model.tok_embeddings)
    parts[-1] += [model.norm, model.output]
    return [nn.ModuleList(part) for part in parts]


def diloco(every: int, fragments: int = 1) -> Function:
    """Return what builds AdamW with a sync of each fragment every so many steps."""

    def build(
        model_parts: list[nn.Module], config: OptimizerConfig, dims: ParallelDims
    ) -> OptimizersContainer:
        try:
            from torchft.local_sgd import DiLoCo
        except ModuleNotFoundError as error:  # a plan and a report need none
            want = "another optimizer, or the packages of scripts/research/race/requirements.txt"
            raise ConfigError("optimizer.name", config.name, want) from error
        optimizers = build_optimizers(model_parts, replace(config, name="AdamW"), dims)
        group = dims.get_mesh("dp_replicate").get_group()
        (model,), (inner,) = model_parts, optimizers
        parts = fragments_of(model, fragments)
        outer = [torch.optim.SGD(part.parameters(), **OUTER) for part in parts]
        streams = STREAMING if fragments > 1 else {}
        sync = DiLoCo(FixedReplicas(group), parts, inner, outer, sync_every=every, **streams)
        optimizers.diloco = sync.__enter__()  # its hooks run after every step of AdamW
        optimizers.gradients = LocalGradients(model_parts, group.size())
        return optimizers

    return build
