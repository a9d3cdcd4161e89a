# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of ``[optimizer]`` against the model."""

from functools import cache
from typing import Any

from torchtitan_lr.config.schema import Optimizer
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.optim.entries import ENTRIES, imported
from torchtitan_lr.titan import logger

ADAMW_RATES = (1e-5, 1e-2)  # lowest and highest learning rate of AdamW beside another optimizer


def check_rates(config: Any, world_size: int, device_type: str) -> None:
    """Of a spectral optimizer, refuse a decay that would turn a weight's sign; warn of odd rates.

    A decoupled decay multiplies a weight by 1 − lr · weight_decay, and LoRA-Muon's each factor by
    the root of it. With AdamW and TSR-Adam everything is as in torch, which refuses nothing.
    """
    from torchtitan_lr.optim.groups import Rates, rates_of

    section, published = config.optimizer, ENTRIES[config.optimizer.name].published_rates
    if published is None:
        return
    args = llama_args(config)
    found = {Rates("lr", section.lr, section.weight_decay)}
    if args is not None:
        found = set(rates_of(section, model_shapes(args)).values())
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
            _warn_of_scale(section.name, published, rate, lr)
        elif lr and section.adamw_lr == 0:  # AdamW then has the rate of the matrices
            _warn_of_scale("AdamW", ADAMW_RATES, rate, lr)


@cache  # a sweep checks many runs
def _warn_of_scale(rule: str, published: tuple[float, float], rate: str, lr: float) -> None:
    """Warn of a learning rate that is not of the scale of a rule."""
    low, high = published
    if not low <= lr <= high:
        what = "%s = %g is not of the scale of %s, whose published rates are %g to %g"
        logger.warning(f"{what}: is it another optimizer's?", rate, lr, rule, low, high)


def check_groups(config: Any, world_size: int, device_type: str) -> None:
    """Check that the optimizer reads the keys of rates, and that every group has a parameter."""
    from torchtitan_lr.compression.settings import merged
    from torchtitan_lr.optim.groups import check_patterns

    section, ignoring = config.optimizer, _what_ignores_rates(config)
    if ignoring:
        defaults = ENTRIES[section.name].defaults
        for name in ("groups", "weight_decay_on", "adamw_lr", "adamw_weight_decay"):
            key, got = f"optimizer.{name}", getattr(section, name)
            default = defaults.get(key, getattr(Optimizer(), name))
            require(got == default, key, got, f"{default!r} with {ignoring}")
        return
    if section.groups:
        names = list(model_shapes(llama_args(config)))
        check_patterns(names, section, merged(names))


def check_outside(config: Any, world_size: int, device_type: str) -> None:
    """Run the check of an optimizer from outside, and refuse a dtype of sums that are its own."""
    if llama_args(config) is None:  # another package's model, which builds its own optimizer
        return
    entry = ENTRIES[config.optimizer.name]
    if entry.check is not None:
        imported(entry.check)(config, world_size, device_type)
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas > 1 and entry.sums_replicas and not entry.reads_wire_dtype:
        key, dtype = "training.mixed_precision_reduce", config.training.mixed_precision_reduce
        want = f"'float32' with {entry.name}, which sums over the replicas itself, without this key"
        require(dtype == "float32", key, dtype, want)


def _what_ignores_rates(config: Any) -> str:
    """Name what builds the optimizer without reading the keys of rates; "" if it reads them."""
    from torchtitan_lr.titan.components import build_optimizers
    from torchtitan_lr.titan.specs import get_train_spec

    name, model = config.optimizer.name, f"model.name = {config.model.name!r}"
    if llama_args(config) is not None:
        ignores = f"optimizer.name = {name!r}, registered without reads_groups = True"
        return "" if ENTRIES[name].reads_groups else ignores
    if get_train_spec(config.model.name).build_optimizers_fn is build_optimizers:
        known = [entry.name for entry in ENTRIES.values() if entry.in_torchtitan]
        require(name in known, "optimizer.name", name, f"{one_of(known, name)} with {model}")
    return f"{model}, whose package builds its own optimizer"
