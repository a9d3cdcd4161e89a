# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One torchtitan TrainSpec per model family; importing this module registers them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from torchtitan_lr.config import schema
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.models.ends import build_loss
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.models.flavors import FLAVORS, FlavorTable
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.optim.adam import ON_SHARDS
from torchtitan_lr.optim.container import trained_parameters
from torchtitan_lr.optim.groups import ParameterGroups, regroup, split
from torchtitan_lr.optim.resume import ConfiguredLR, keep_hyperparameters
from torchtitan_lr.optim.spectral.container import SpectralOptimizers
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.parallel import parallelize
from torchtitan_lr.parallel.data_parallel import REPLICAS_WIRE
from torchtitan_lr.parallel.pipeline import pipeline_llama
from torchtitan_lr.titan import components
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import LRSchedulersContainer, OptimizersContainer
from torchtitan_lr.titan.specs import REGISTERED_SPECS, TrainSpec, register_train_spec
from torchtitan_lr.training.metrics import LowRankMetricsProcessor
from torchtitan_lr.training.validate import Validator

PARALLELIZE = {
    "full": parallelize.parallelize_llama_full,
    "svd": parallelize.parallelize_llama_svd,
    "cola": parallelize.parallelize_llama_cola,
    "lax": parallelize.parallelize_llama_lax,
}
"""By family; those from outside the package have the function of ``svd``, or of ``full``."""


BuildOptimizers = Callable[[list[nn.Module], OptimizerConfig, ParallelDims], OptimizersContainer]

FROM_OUTSIDE: dict[str, BuildOptimizers] = {}
"""Builds an optimizer from outside the package, by its value of ``optimizer.name``."""

Check = Callable[[Any, int, str], None]

OUTSIDE_CHECKS: dict[str, Check] = {}
"""Refuses what an optimizer from outside does not fit, by its value of ``optimizer.name``."""


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: OptimizerConfig, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """Build a container of optimizers, one per pipeline stage: torchtitan's, or another."""
    if optimizer_config.name in FROM_OUTSIDE:
        return FROM_OUTSIDE[optimizer_config.name](model_parts, optimizer_config, parallel_dims)
    groups = ParameterGroups.from_config(optimizer_config)
    if optimizer_config.name in schema.SPECTRAL:
        return SpectralOptimizers(model_parts, optimizer_config, groups)
    named = trained_parameters(*model_parts)
    rates = groups.rates(optimizer_config, {name: p.shape for name, p in named.items()})
    if optimizer_config.name == schema.TSR:
        meshes = [parallel_dims.get_optional_mesh(name) for name in ("dp_replicate", "pp")]
        replicas, stages = (None if mesh is None else mesh.get_group() for mesh in meshes)
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        return TSROptimizers(
            model_parts,
            TSRSettings.from_config(optimizer_config),
            defaults={name: getattr(optimizer_config, name) for name in names},
            replicas=replicas,
            stages=stages,
            rates=rates,
            wire_dtype=REPLICAS_WIRE.get(model_parts[0]),
        )
    optimizers = components.build_optimizers(model_parts, optimizer_config, parallel_dims)
    for part, optimizer in zip(model_parts, optimizers, strict=True):
        regroup(optimizer, split(trained_parameters(part).items(), rates))
        # Other optimizers than Adam and AdamW are left alone.
        optimizer.__class__ = ON_SHARDS.get(type(optimizer), type(optimizer))
        optimizer.register_load_state_dict_pre_hook(keep_hyperparameters)
    return optimizers


def register_optimizer(
    name: str,
    build: BuildOptimizers,
    sums_replicas: bool = False,
    reads_groups: bool = False,
    base: str = "",
    check: Check | None = None,
) -> None:
    """Register an optimizer from outside the package, also as a value of ``optimizer.name``.

    `build` returns the optimizers of this rank's model parts, whose weights are drawn; rates and
    other keys are those of ``[optimizer]``. An attribute ``gradients`` of what it returns is used
    in the place of `StoredGradients`. With `sums_replicas`, gradients reach the optimizer without
    the sum over the replicas (``parallelism.data_parallel_replicate_degree``): it must then sum
    them itself. An optimizer that does not take its rates from `ParameterGroups.rates`
    (`reads_groups`) is refused ``[[optimizer.groups]]``, ``adamw_lr`` and ``adamw_weight_decay``.
    `base` is the optimizer of this package, such as TSRAdam, that `build` gets from
    `build_optimizers` and changes: checks, defaults and stored state of that one hold for this one
    too; state that `build` adds is its own to save. `check` is called before a rank starts, with
    the configuration, the number of ranks and the type of their device; it raises a `ConfigError`
    for what the optimizer does not fit. One whose replicas differ refuses ``checkpoint.enable``: a
    checkpoint takes each tensor from any one of them.
    """
    if name in schema.OPTIMIZERS:
        raise ValueError(f"the name {name!r} of an optimizer is taken")
    if base and base not in schema.BUILT_IN_OPTIMIZERS:
        raise ValueError(f"base is {base!r}, not one of {', '.join(schema.BUILT_IN_OPTIMIZERS)}")
    FROM_OUTSIDE[name] = build
    schema.OPTIMIZERS.append(name)
    if base:
        schema.BASES[name] = base
    if check:
        OUTSIDE_CHECKS[name] = check
    if sums_replicas or base in schema.SUMS_REPLICAS:
        schema.SUMS_REPLICAS.append(name)
    if reads_groups or base:
        schema.READS_GROUPS.append(name)


def build_lr_schedulers(
    optimizers: OptimizersContainer, config: Any, steps: int
) -> LRSchedulersContainer:
    """Build torchtitan's schedules; a resumed run loads only their step."""
    schedulers = components.build_lr_schedulers(optimizers, config, steps)
    for scheduler in schedulers:
        scheduler.__class__ = ConfiguredLR
    return schedulers


def register_model_family(family: ModelFamily) -> None:
    """Make a family known: its name, its flavors and its TrainSpec, as ``llama_`` and its name.

    Another's module is named by ``experimental.custom_import``.
    """
    FAMILIES[family.name] = family
    flavors = FLAVORS.setdefault(family.name, FlavorTable(family))
    if family.model_name in REGISTERED_SPECS:  # torchtitan raises for a second registration
        return
    kind = "svd" if family.low_rank else "full"
    spec = TrainSpec(
        model_cls=LlamaModel,
        model_args=flavors,
        parallelize_fn=PARALLELIZE.get(family.name) or PARALLELIZE[kind],
        pipelining_fn=pipeline_llama,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,  # ranks read prepared tokens
        build_loss_fn=build_loss,
        build_validator_fn=Validator,
        build_metrics_processor_fn=LowRankMetricsProcessor,
        state_dict_adapter=LlamaStateDictAdapter,
    )
    register_train_spec(family.model_name, spec)


for _family in list(FAMILIES.values()):
    register_model_family(_family)
