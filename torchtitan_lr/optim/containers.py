# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Torchtitan's container of optimizers, and what builds it for each optimizer of the package."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.groups import param_groups
from torchtitan_lr.optim.spectral.matrices import select_matrices
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.titan import components
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims

REPLICAS_WIRE: WeakKeyDictionary[nn.Module, torch.dtype] = WeakKeyDictionary()
"""Dtype in which an optimizer sums a model part's gradients over the replicas, if not their own.

torchtitan builds optimizers from model parts and ``[optimizer]``, without ``[training]``.
"""


class NamedOptimizers(components.OptimizersContainer):
    """Optimizers whose parameter groups have names, and whose state exists from the start.

    The state is saved by the names of parameters, so that it loads in any layout. Optimizers have
    no common parameter; each may have those of all model parts.
    """

    gradients: TSRAdam  # in the place of `optim.gradients.StoredGradients`; only with TSR-Adam

    def __init__(self, model_parts: list[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.model_parts, self.optimizers = model_parts, list(optimizers)
        groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        components.init_optimizer_container(
            self, [p for group in groups for p in group["params"]], {}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as ``state.NAME.KEY`` and ``param_groups.NAME.KEY``."""
        found = {}
        for optimizer in self.optimizers:
            own = optimizer.state_dict()  # its method may have to settle a rejected step
            for group in own["param_groups"]:
                hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                for name, index in zip(group["param_names"], group["params"], strict=True):
                    for key, value in own["state"].get(index, {}).items():
                        found[f"state.{name}.{key}"] = value
                    for key, value in hyper.items():
                        found[f"param_groups.{name}.{key}"] = value
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the optimizers' tensors; hyperparameters stay the configured ones."""
        for name, own in self.state_dict().items():
            if name.startswith("state."):
                local_part(own).copy_(local_part(state_dict[name]))


class ConfiguredRates(components.LRSchedulersContainer):
    """torchtitan's schedules of learning rates, of which a checkpoint has the step alone.

    So the rates of a resumed run are those that its own configuration gives the steps to come.
    Torch's schedules would go on with the saved base rates, whatever the configuration says.
    """

    def __init__(self, optimizers: components.OptimizersContainer, config: Any, steps: int) -> None:
        self.schedulers = components.build_lr_schedulers(optimizers, config, steps).schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return the step, which all schedules have in common."""
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the optimizers' rates to those of a saved step."""
        step = state_dict["last_epoch"]
        for schedule in self.schedulers:
            schedule.last_epoch = step
            groups = schedule.optimizer.param_groups
            for group, base, factor in zip(
                groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(step)


class ShardAdam(torch.optim.Adam):
    """`torch.optim.Adam` that updates local shards; its state stays DTensors, for checkpoints.

    Adam is elementwise, so each shard can be updated alone. Torch's own step passes lists of
    DTensors to the dispatcher, which looks up the placements of every parameter on the host.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # Torch collects parameters, gradients and states here, then updates the collected tensors.
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


class ShardAdamW(ShardAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local shards."""


def adam_with_state(groups: list[dict[str, Any]], config: OptimizerConfig) -> ShardAdam:
    """Build AdamW, or the Adam that is configured, whose state is there before the first step."""
    how = config.implementation
    optimizer = (ShardAdam if config.name == "Adam" else ShardAdamW)(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=how == "fused",
        foreach=how == "foreach",
    )
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        # As torch creates it in the first step: a state to load needs tensors.
        device = local_part(parameter).device if how == "fused" else "cpu"
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def trained_parameters(*model_parts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of model parts that are trained, by their names on one device."""
    found: dict[str, Tensor] = {}
    for part in model_parts:
        found |= {clean_name(n): p for n, p in part.named_parameters() if p.requires_grad}
    return found


def build_adam(
    model_parts: list[nn.Module], config: OptimizerConfig, parallel_dims: ParallelDims
) -> NamedOptimizers:
    """Build Adam or AdamW for every parameter."""
    adam = adam_with_state(param_groups(trained_parameters(*model_parts), config), config)
    return NamedOptimizers(model_parts, [adam])


def beside_adamw(
    model_parts: list[nn.Module], config: OptimizerConfig, of_matrices: Callable[..., Optimizer]
) -> NamedOptimizers:
    """Build an optimizer for the matrices that its entry says, of all model parts, and AdamW.

    ``of_matrices`` builds it from the parameter groups of its matrices, and the pairs A, B among
    them. Gradients are those that FSDP2 leaves: `optim.gradients.StoredGradients`.
    """
    parameters = trained_parameters(*model_parts)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    chosen = select_matrices(shapes, ENTRIES[config.name].updates)
    matrices = {name: p for name, p in parameters.items() if name in chosen.names}
    others = {name: p for name, p in parameters.items() if name not in chosen.names}
    optimizers: list[Optimizer] = []
    if matrices:  # a pipeline stage may have none
        pairs = [(parameters[a], parameters[b]) for a, b in chosen.pairs]
        optimizers.append(of_matrices(param_groups(matrices, config), pairs))
    if others:
        optimizers.append(adam_with_state(param_groups(others, config), config))
    return NamedOptimizers(model_parts, optimizers)


def build_spectral(
    model_parts: list[nn.Module], config: OptimizerConfig, parallel_dims: ParallelDims
) -> NamedOptimizers:
    """Build the optimizer of the rule that the configuration names, with AdamW for the rest."""
    options: Any = config  # whose own keys are not torchtitan's
    own = {"momentum": options.momentum, "nesterov": options.nesterov}
    return beside_adamw(
        model_parts,
        config,
        lambda groups, pairs: SpectralOptimizer(groups, config.name, pairs, **own),
    )


def build_tsr(
    model_parts: list[nn.Module], config: OptimizerConfig, parallel_dims: ParallelDims
) -> NamedOptimizers:
    """Build one TSR-Adam for all model parts of a rank, with one exchange for all their cores."""
    meshes = [parallel_dims.get_optional_mesh(name) for name in ("dp_replicate", "pp")]
    replicas, stages = (None if mesh is None else mesh.get_group() for mesh in meshes)
    parameters = [trained_parameters(part) for part in model_parts]
    optimizer = TSRAdam(
        list(chain.from_iterable(param_groups(of_part, config) for of_part in parameters)),
        TSRSettings.from_config(config),
        **{name: getattr(config, name) for name in ("beta1", "beta2", "eps")},
        group=replicas,
        stages=stages,
        wire_dtype=REPLICAS_WIRE.get(model_parts[0]),
        order=[p for of_part in parameters for p in of_part.values()],
    )
    container = NamedOptimizers(model_parts, [optimizer])
    container.gradients = optimizer
    return container
