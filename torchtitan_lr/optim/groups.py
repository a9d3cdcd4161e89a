# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Groups of parameters with their own learning rate and weight decay, ``[[optimizer.groups]]``.

Their keys are those of torchtitan's ``param_groups`` (its pull request 2859). The names of a model
on one device decide: they are equal in every layout, and on every pipeline stage.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_lr.config.schema import PRODUCTS, SPECTRAL
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer

KEY = "optimizer.groups"

FACTORS = (".A.weight", ".B.weight")
"""Ends of the names of the factors of a linear B A."""

DecayOn = Literal["all", "matrices", "products"]
"""Values of ``optimizer.weight_decay_on``."""


class GroupRule(NamedTuple):
    """A table ``[[optimizer.groups]]``."""

    pattern: str = ""
    """A regular expression, found anywhere in the names of its parameters."""
    lr_multiplier: float = 1.0
    """Factor on the optimizer's learning rate."""
    weight_decay_multiplier: float = 1.0
    """Factor on ``optimizer.weight_decay``."""


@dataclass(frozen=True)
class ParameterGroups:
    """How the parameters of a model are grouped.

    Args:
        rules: A parameter belongs to the first one whose pattern is found in its name.
        decay_on: Which parameters have a weight decay.
    """

    rules: tuple[GroupRule, ...] = ()
    decay_on: DecayOn = "all"

    @classmethod
    def from_config(cls, optimizer: Any) -> "ParameterGroups":
        """Read ``[[optimizer.groups]]`` and ``optimizer.weight_decay_on``.

        Raises:
            ConfigError: A table has an unknown key or a wrong value.
        """
        rules = [_read_rule(index, entry) for index, entry in enumerate(optimizer.groups)]
        return cls(tuple(rules), optimizer.weight_decay_on)

    def place(self, name: str) -> int:
        """Return the index of a parameter's rule; -1 if no pattern is found in its name."""
        for index, rule in enumerate(self.rules):
            if re.search(rule.pattern, name):
                return index
        return -1

    def rule(self, name: str) -> GroupRule:
        """Return the rule of a parameter."""
        place = self.place(name)
        return GroupRule() if place == -1 else self.rules[place]

    def decay(self, name: str, weight_decay: float) -> float:
        """Return the weight decay of a parameter that has one."""
        return weight_decay * self.rule(name).weight_decay_multiplier

    def split(
        self, named_parameters: Iterable[tuple[str, Tensor]], lr: float, weight_decay: float
    ) -> list[dict[str, Any]]:
        """Return torch's groups of some parameters: those without a rule first, none empty.

        Args:
            named_parameters: Name and parameter.
            lr: The learning rate that a rule multiplies.
            weight_decay: The weight decay that a rule multiplies.
        """
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for name, parameter in named_parameters:
            place = self.place(name)
            decays = self.decay_on == "all" or parameter.dim() > 1
            if self.decay_on == PRODUCTS and name.endswith(FACTORS):
                decays = False  # `optim.product_decay` shrinks B A instead
            group = {
                "params": [],
                "lr": lr * self.rule(name).lr_multiplier,
                "weight_decay": self.decay(name, weight_decay) if decays else 0.0,
            }
            groups.setdefault((place, decays), group)["params"].append((name, parameter))
        return [group for _, group in sorted(groups.items())]

    def rates(
        self,
        optimizer: Any,
        schedule: LambdaLR,
        optimizers: Iterable[Optimizer],
        names: Mapping[Tensor, str],
    ) -> dict[str, float]:
        """Return the learning rates of a step as metrics: ``lr`` and ``lr/PATTERN``.

        With a spectral optimizer ``adamw_lr`` and ``adamw_lr/PATTERN`` are those of AdamW. They are
        those that the optimizers have; of a group that is on other pipeline stages alone, and of a
        rate that no parameter has, those of the configuration.

        Args:
            optimizer: ``[optimizer]``.
            schedule: Of any stage's optimizer.
            optimizers: Those of this rank.
            names: Of this rank's parameters.
        """
        rates = {"lr": optimizer.lr}
        if optimizer.name in SPECTRAL:
            rates["adamw_lr"] = optimizer.adamw_lr or optimizer.lr
        for name, rate in list(rates.items()):
            for rule in self.rules:
                rates[f"{name}/{rule.pattern}"] = rate * rule.lr_multiplier
        factor = schedule.lr_lambdas[0](schedule.last_epoch)
        rates = {name: rate * factor for name, rate in rates.items()}
        for own in optimizers:
            of_adamw = optimizer.name in SPECTRAL and not isinstance(own, SpectralOptimizer)
            for group in own.param_groups:
                name = "adamw_lr" if of_adamw else "lr"
                place = self.place(names[group["params"][0]])
                if place != -1:
                    name += f"/{self.rules[place].pattern}"
                rates[name] = float(group["lr"])
        return rates


ONE_GROUP = ParameterGroups()
"""All parameters alike."""


def regroup(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Split the one group of an optimizer; the new ones keep its other hyperparameters."""
    (whole,) = optimizer.param_groups
    optimizer.param_groups = [
        whole | group | {"params": [parameter for _, parameter in group["params"]]}
        for group in groups
    ]


def check_names(names: Iterable[str], groups: ParameterGroups, shown: str) -> None:
    """Check that every rule has a parameter.

    Args:
        names: Those of all parameters of the model.
        groups: The rules.
        shown: The names in one line, for the error.

    Raises:
        ConfigError: A pattern is in no name, or earlier rules take all parameters that it is in.
    """
    known = list(names)
    taken = {groups.place(name) for name in known}
    for index, rule in enumerate(groups.rules):
        if index in taken:
            continue
        want = f"a regular expression that is found in a parameter's name, of {shown}"
        if any(re.search(rule.pattern, name) for name in known):
            want = "a table above those whose patterns take all of its parameters: the first counts"
        raise ConfigError(f"{KEY}[{index}].pattern", rule.pattern, want)


def _read_rule(index: int, entry: dict[str, Any]) -> GroupRule:
    """Check one table."""
    for name, value in {"pattern": "", **entry}.items():
        key = f"{KEY}[{index}].{name}"
        if name == "pattern":
            want = "a regular expression such as 'norm' or '\\.A\\.weight'"
            require(isinstance(value, str) and value, key, value, want)
            try:
                re.compile(value)
            except re.error as error:
                raise ConfigError(key, value, f"{want} ({error})") from error
            continue
        require(name in GroupRule._fields, key, value, one_of(GroupRule._fields, name))
        fits = type(value) in (int, float) and 0 <= value < math.inf
        require(fits, key, value, "a factor of at least 0")
    return GroupRule(**entry)
