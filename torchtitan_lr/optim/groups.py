# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Groups of parameters with their own learning rate and weight decay, ``[[optimizer.groups]]``.

Their keys are those of torchtitan's ``param_groups`` (its pull request 2859). The names of a model
on one device decide: they are equal in every layout, and on every pipeline stage.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.spectral.selection import select_matrices

KEY = "optimizer.groups"

DecayOn = Literal["all", "matrices"]
"""Values of ``optimizer.weight_decay_on``."""


class GroupRule(NamedTuple):
    """A table ``[[optimizer.groups]]``."""

    pattern: str = ""
    """A regular expression, found anywhere in the names of its parameters."""
    lr_multiplier: float = 1.0
    """Factor on the learning rate that its parameters have otherwise."""
    weight_decay_multiplier: float = 1.0
    """Factor on the weight decay that they have otherwise."""


class Rates(NamedTuple):
    """The rates of a parameter."""

    metric: str
    """The learning rate's name in the log: ``lr`` or ``adamw_lr``, of a group ``lr/PATTERN``."""
    lr: float
    """The learning rate, before the schedule."""
    weight_decay: float
    """The weight decay of the optimizer's own step."""
    place: int = -1
    """Index of the parameter's rule; -1 if it has none."""


@dataclass(frozen=True)
class ParameterGroups:
    """How the parameters of a model are grouped."""

    rules: tuple[GroupRule, ...] = ()
    """A parameter belongs to the first one whose pattern is found in its name."""
    decay_on: DecayOn = "all"

    @classmethod
    def from_config(cls, optimizer: Any) -> "ParameterGroups":
        """Read ``[optimizer]``; a ConfigError names an unknown key or a wrong value of a table."""
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

    def decays(self, dims: int) -> bool:
        """Return whether the optimizer's own step shrinks a parameter of ``dims`` dimensions."""
        return self.decay_on == "all" or dims > 1

    def rates(self, optimizer: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Rates]:
        """Return the rates by ``[optimizer]`` of parameters, from their global shapes by name."""
        matrices = select_matrices(shapes, ENTRIES[optimizer.name].updates).names
        of_matrices = Rates("lr", optimizer.lr, optimizer.weight_decay)
        found = {}
        for name, shape in shapes.items():
            own, rule = of_matrices if name in matrices else of_others(optimizer), self.rule(name)
            metric = f"{own.metric}/{rule.pattern}" if rule.pattern else own.metric
            decay = own.weight_decay * rule.weight_decay_multiplier * self.decays(len(shape))
            found[name] = Rates(metric, own.lr * rule.lr_multiplier, decay, self.place(name))
        return found


ONE_GROUP = ParameterGroups()
"""All parameters alike."""


def of_others(optimizer: Any) -> Rates:
    """Return the rates by ``[optimizer]`` of embedding, head, norms and gates, before factors."""
    lr, weight_decay = optimizer.adamw_lr, optimizer.adamw_weight_decay
    own = ENTRIES[optimizer.name].updates != "all" or lr != 0 or weight_decay != -1
    return Rates(
        "adamw_lr" if own else "lr",
        lr or optimizer.lr,
        optimizer.weight_decay if weight_decay == -1 else weight_decay,
    )


def split(
    named_parameters: Iterable[tuple[str, Tensor]], rates: Mapping[str, Rates]
) -> list[dict[str, Any]]:
    """Return torch's groups of named parameters, one for all that have the same rates.

    Groups without a rule come first, then those of the first rule; of each, those without decay.
    """
    groups: dict[Rates, dict[str, Any]] = {}
    for name, parameter in named_parameters:
        own = rates[name]
        group = {"params": [], "lr": own.lr, "weight_decay": own.weight_decay}
        groups.setdefault(own, group)["params"].append((name, parameter))
    order = sorted(groups, key=lambda own: (own.place, own.weight_decay > 0))
    return [groups[own] for own in order]


class LoggedRates:
    """The learning rates of a step as metrics: ``lr``, and ``lr/PATTERN`` of each group.

    ``adamw_lr`` and ``adamw_lr/PATTERN`` are those of embedding, head, norms and gates, with a
    optimizer of matrices or where their rates are configured. A rate is the one that an optimizer
    of this rank has; where only other pipeline stages have the group, the configured one. So all
    ranks log the same names: those of rates that a parameter of the whole model has, and ``lr`` and
    ``adamw_lr``, which groups multiply.
    """

    def __init__(
        self, optimizer: Any, rates: Mapping[str, Rates], names: Mapping[Tensor, str]
    ) -> None:
        self._metrics = {parameter: rates[name].metric for parameter, name in names.items()}
        others = of_others(optimizer)
        self._configured = {"lr": optimizer.lr, others.metric: others.lr}
        self._configured |= {own.metric: own.lr for own in rates.values()}

    def of_step(self, schedule: LambdaLR, optimizers: Iterable[Optimizer]) -> dict[str, float]:
        """Return what the next step of this rank's optimizers uses, by any one's schedule."""
        factor = schedule.lr_lambdas[0](schedule.last_epoch)
        found = {metric: rate * factor for metric, rate in self._configured.items()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                found[self._metrics[group["params"][0]]] = float(group["lr"])
        return found


def regroup(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Split the one group of an optimizer; the new ones keep its other hyperparameters."""
    (whole,) = optimizer.param_groups
    optimizer.param_groups = []
    for group in groups:
        parameters = [parameter for _, parameter in group["params"]]
        optimizer.param_groups.append(whole | group | {"params": parameters})


def check_names(names: Iterable[str], groups: ParameterGroups, shown: str) -> None:
    """Refuse a pattern that is in no name of the model, or whose parameters earlier rules take."""
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
