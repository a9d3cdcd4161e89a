# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of ``[optimizer]`` against the model."""

from typing import Any

from torchtitan_lr.config.schema import PRODUCTS
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.titan import logger

PUBLISHED_RATES = {
    "Muon": (1e-4, 1e-2),  # AdamW's, which Moonlight's scale keeps (arXiv 2502.16982)
    "Spectron": (1e-3, 1e-1),  # arXiv 2602.12429
    "LoRAMuon": (1e-3, 1e-1),  # of updates of spectral norm 1, as Jordan et al.'s Muon, 2e-2
}
"""Lowest and highest learning rate of a rule."""


def check_rates(config: Any, world_size: int, device_type: str) -> None:
    """Warn of a learning rate that belongs to another optimizer; check LoRA-Muon's decay.

    It multiplies each factor by the root of 1 − lr · weight_decay, which must be positive.
    """
    from torchtitan_lr.optim.groups import GroupRule, ParameterGroups

    name, lr = config.optimizer.name, config.optimizer.lr
    low, high = PUBLISHED_RATES.get(name, (lr, lr))
    if not low <= lr <= high:
        what = "optimizer.lr = %g is not of the scale of %s, whose published rates are %g to %g"
        logger.warning(f"{what}: is it another optimizer's?", lr, name, low, high)
    section = config.optimizer
    if name != "LoRAMuon" or section.weight_decay_on == PRODUCTS:  # factors have no decay then
        return
    for rule in (GroupRule(), *ParameterGroups.from_config(section).rules):
        rate = lr * rule.lr_multiplier * rule.weight_decay_multiplier
        if section.weight_decay * rate >= 1:
            want = f"less than {1 / rate:g} with LoRAMuon, so that its step keeps a part of B A"
            raise ConfigError("optimizer.weight_decay", section.weight_decay, want)


def check_groups(config: Any, world_size: int, device_type: str) -> None:
    """Check that every table of ``[[optimizer.groups]]`` has a parameter of the whole model."""
    from torchtitan_lr.compression.settings import merged
    from torchtitan_lr.optim.groups import KEY, ONE_GROUP, ParameterGroups, check_names
    from torchtitan_lr.optim.spectral.selection import factor_pairs

    section = config.optimizer
    groups = ParameterGroups.from_config(section)
    if groups == ONE_GROUP:
        return
    args = llama_args(config)
    key, decay_on = "optimizer.weight_decay_on", section.weight_decay_on
    other = f"with model.name = {config.model.name!r}, whose package builds its own optimizer"
    require(args is not None or not section.groups, KEY, section.groups, f"none {other}")
    require(args is not None, key, decay_on, f"'all' {other}")
    names = list(model_shapes(args))
    check_names(names, groups, merged(names))
    if decay_on == PRODUCTS:
        want = f"'matrices' or 'all' with model.name = {config.model.name!r}: it has no factors"
        require(factor_pairs(names), key, decay_on, want)
        offload = config.training.enable_cpu_offload
        want = f"false with {key} = 'products', which needs sums on the device"
        require(not offload, "training.enable_cpu_offload", offload, want)
