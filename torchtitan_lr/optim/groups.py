# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Groups of parameters with their own learning rate and weight decay, ``[[optimizer.groups]]``.

Their keys are those of torchtitan's ``param_groups`` (its pull request 2859). The names of a model
on one device decide: they are equal in every layout, and on every pipeline stage.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.spectral.matrices import select_matrices

KEY = "optimizer.groups"


class GroupRule(NamedTuple):
    """A table ``[[optimizer.groups]]``."""

    pattern: str = ""  # a regular expression, found anywhere in the names of its parameters
    lr_multiplier: float = 1.0  # factor on the learning rate that its parameters have otherwise
    weight_decay_multiplier: float = 1.0  # factor on the weight decay that they have otherwise


class Rates(NamedTuple):
    """The rates of a parameter."""

    metric: str
    """The learning rate's name in the log: ``lr`` or ``adamw_lr``, of a group ``lr/PATTERN``."""
    lr: float  # the learning rate, before the schedule
    weight_decay: float  # the weight decay of the optimizer's own step
    place: int = -1  # index of the parameter's rule; -1 if it has none


def read_rules(optimizer: Any) -> list[GroupRule]:
    """Read the tables; a ConfigError names an unknown key or a wrong value."""
    rules = []
    for index, table in enumerate(optimizer.groups):
        for name, value in {"pattern": "", **table}.items():
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
        rules.append(GroupRule(**table))
    return rules


def place_of(name: str, rules: Sequence[GroupRule]) -> int:
    """Return the index of the first rule whose pattern is in a parameter's name; -1 if none is."""
    found = (index for index, rule in enumerate(rules) if re.search(rule.pattern, name))
    return next(found, -1)


def rates_of(optimizer: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Rates]:
    """Return the rates by ``[optimizer]`` of parameters, from their global shapes by name."""
    rules = read_rules(optimizer)
    matrices = select_matrices(shapes, ENTRIES[optimizer.name].updates).names
    of_matrices = Rates("lr", optimizer.lr, optimizer.weight_decay)
    found = {}
    for name, shape in shapes.items():
        own = of_matrices if name in matrices else of_others(optimizer)
        if optimizer.weight_decay_on == "matrices" and len(shape) < 2:
            own = own._replace(weight_decay=0.0)
        if (place := place_of(name, rules)) != -1:
            rule = rules[place]
            metric, lr = f"{own.metric}/{rule.pattern}", own.lr * rule.lr_multiplier
            own = Rates(metric, lr, own.weight_decay * rule.weight_decay_multiplier, place)
        found[name] = own
    return found


def of_others(optimizer: Any) -> Rates:
    """Return the rates by ``[optimizer]`` of embedding, head, norms and gates, before factors."""
    lr, weight_decay = optimizer.adamw_lr, optimizer.adamw_weight_decay
    own = ENTRIES[optimizer.name].updates != "all" or lr != 0 or weight_decay != -1
    return Rates(
        "adamw_lr" if own else "lr",
        lr or optimizer.lr,
        optimizer.weight_decay if weight_decay == -1 else weight_decay,
    )


def param_groups(parameters: Mapping[str, Tensor], optimizer: Any) -> list[dict[str, Any]]:
    """Return torch's parameter groups by ``[optimizer]``, one for all that have the same rates.

    Those without a rule come first, then those of the first rule; of each, those without decay.
    """
    rates = rates_of(optimizer, {name: tuple(p.shape) for name, p in parameters.items()})
    distinct = list(dict.fromkeys(rates.values()))
    found = []
    for own in sorted(distinct, key=lambda own: (own.place, own.weight_decay > 0)):
        named = [(name, p) for name, p in parameters.items() if rates[name] == own]
        found.append({"params": named, "lr": own.lr, "weight_decay": own.weight_decay})
    return found


def logged_rates(optimizer: Any, rates: Mapping[str, Rates]) -> dict[str, float]:
    """Return the learning rates before the schedule by the names in the log (`Rates.metric`).

    They are those of the whole model, so that all ranks log the same names.
    """
    others = of_others(optimizer)
    found = {"lr": optimizer.lr, others.metric: others.lr}
    return found | {own.metric: own.lr for own in rates.values()}


def check_patterns(names: Iterable[str], optimizer: Any, shown: str) -> None:
    """Refuse a pattern that is in no name of the model, or in those of earlier rules alone."""
    rules = read_rules(optimizer)
    taken = {place_of(name, rules) for name in names}
    for index, rule in enumerate(rules):
        want = f"what is found in a parameter's name, and no earlier pattern is, of {shown}"
        require(index in taken, f"{KEY}[{index}].pattern", rule.pattern, want)
