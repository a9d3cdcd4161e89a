# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of ``[optimizer]`` against the model."""

from functools import cache
from typing import Any

from torchtitan_lr.config import schema
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.titan import logger

PUBLISHED_RATES = {
    "Muon": (1e-4, 1e-2),  # AdamW's, which Moonlight's scale keeps (arXiv 2502.16982)
    "Spectron": (1e-3, 1e-1),  # arXiv 2602.12429
    "LoRAMuon": (1e-2, 1e-1),  # of updates of spectral norm 1: Jordan et al.'s Muon, 2e-2, to 1e-1
    "AdamW": (1e-5, 1e-2),  # beside a spectral optimizer
}
"""Lowest and highest learning rate of a rule."""


def check_rates(config: Any, world_size: int, device_type: str) -> None:
    """Of a spectral optimizer, refuse a decay that would turn a weight's sign; warn of odd rates.

    A decoupled decay multiplies a weight by 1 − lr · weight_decay, and LoRA-Muon's each factor by
    the root of it. With AdamW and TSR-Adam everything is as in torch, which refuses nothing.
    """
    from torchtitan_lr.optim.groups import ParameterGroups, Rates

    section, base = config.optimizer, schema.base_of(config.optimizer.name)
    if base not in schema.SPECTRAL:
        return
    args = llama_args(config)
    found = {Rates("lr", section.lr, section.weight_decay)}
    if args is not None:
        groups = ParameterGroups.from_config(section)
        found = set(groups.rates(section, model_shapes(args)).values())
    for metric, lr, decay, _ in sorted(found):
        rate = f"optimizer.{metric}".replace("/", " of the group ", 1)
        if lr * decay >= 1:
            key = "weight_decay"
            if metric.startswith("adamw") and section.adamw_weight_decay != -1:
                key = "adamw_weight_decay"
            given = getattr(section, key)
            most = given / (lr * decay)
            want = f"less than {most:g}, so that weights keep their sign where {rate} is {lr:g}"
            raise ConfigError(f"optimizer.{key}", given, want)
        if lr and metric.startswith("lr"):
            _warn_of_scale(base, rate, lr)
        elif lr and section.adamw_lr == 0:  # AdamW then has the rate of the matrices
            _warn_of_scale("AdamW", rate, lr)


@cache  # a sweep checks many runs
def _warn_of_scale(rule: str, rate: str, lr: float) -> None:
    """Warn of a learning rate that is not of the scale of a rule."""
    low, high = PUBLISHED_RATES[rule]
    if not low <= lr <= high:
        what = "%s = %g is not of the scale of %s, whose published rates are %g to %g"
        logger.warning(f"{what}: is it another optimizer's?", rate, lr, rule, low, high)


def check_groups(config: Any, world_size: int, device_type: str) -> None:
    """Check that the optimizer reads the keys of rates, and that every group has a parameter."""
    from torchtitan_lr.compression.settings import merged
    from torchtitan_lr.optim.groups import ONE_GROUP, ParameterGroups, check_names

    section, ignoring = config.optimizer, _what_ignores_rates(config)
    if ignoring:
        defaults = schema.DEFAULTS_OF.get(schema.base_of(section.name), {})
        for name in ("groups", "weight_decay_on", "adamw_lr", "adamw_weight_decay"):
            key, got = f"optimizer.{name}", getattr(section, name)
            default = defaults.get(key, getattr(schema.Optimizer(), name))
            require(got == default, key, got, f"{default!r} with {ignoring}")
        return
    groups = ParameterGroups.from_config(section)
    if groups == ONE_GROUP:
        return
    names = list(model_shapes(llama_args(config)))
    check_names(names, groups, merged(names))


def check_outside(config: Any, world_size: int, device_type: str) -> None:
    """Run the check of an optimizer from outside, and refuse a dtype of sums that are its own."""
    from torchtitan_lr.training.register import OUTSIDE_CHECKS

    if llama_args(config) is None:  # another package's model, which builds its own optimizer
        return
    name, training = config.optimizer.name, config.training
    if check := OUTSIDE_CHECKS.get(name):
        check(config, world_size, device_type)
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas > 1 and name in schema.SUMS_REPLICAS and schema.base_of(name) != schema.TSR:
        key, dtype = "training.mixed_precision_reduce", training.mixed_precision_reduce
        want = f"'float32' with optimizer.name = {name!r}, which sums over the replicas itself"
        require(dtype == "float32", key, dtype, want)


def _what_ignores_rates(config: Any) -> str:
    """Name what builds the optimizer without reading the keys of rates; "" if it reads them."""
    from torchtitan_lr.titan.components import build_optimizers
    from torchtitan_lr.titan.specs import get_train_spec

    name, model = config.optimizer.name, f"model.name = {config.model.name!r}"
    if llama_args(config) is not None:
        ignores = f"optimizer.name = {name!r}, registered without reads_groups = True"
        return "" if name in schema.READS_GROUPS else ignores
    if get_train_spec(config.model.name).build_optimizers_fn is build_optimizers:
        require(
            name in schema.ADAMS,
            "optimizer.name",
            name,
            f"{one_of(schema.ADAMS, name)} with {model}",
        )
    return f"{model}, whose package builds its own optimizer"
