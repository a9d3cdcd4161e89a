# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a checkpoint holds of replicas that train apart.

Its model is the common weights: what reads a checkpoint takes these. ``optimizer`` has a part of
each replica, ``outer`` the momentum and of each replica its own weights, where they differ from the
common ones, and its residual. A tensor is saved by the ranks of its replica, so that it loads in
any layout inside of one. Another number of replicas takes the saved ones in turns.
"""

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torchtitan_lr.checkpoints.folders import OUTER
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.console.log import console
from torchtitan_lr.optim.outer import OuterSteps
from torchtitan_lr.titan.components import MODEL, OptimizersContainer

_OF_REPLICA = re.compile(rf"(?:optimizer|{OUTER})\.replica_(\d+)\.(weights\.)?")

State = dict[str, Any]


class OuterStates:
    """The state ``outer`` of a checkpoint."""

    def __init__(self, outer: OuterSteps, optimizers: OptimizersContainer) -> None:
        self._outer, self._optimizers = outer, optimizers
        self._own = f"replica_{outer.replica}."  # of names; while loading of the saved one to take
        self._residual = outer.residual

    def replace_in(self, states: State) -> None:
        """Replace those states of a checkpoint manager that outer steps change."""
        self._model = states[MODEL]
        states[MODEL] = SimpleNamespace(
            # What does not train, such as a buffer, is the model's own.
            state_dict=lambda: self._model.state_dict() | self._outer.common,
            load_state_dict=self._load_model,
        )
        states["optimizer"] = SimpleNamespace(
            state_dict=self._optimizer_state, load_state_dict=self._load_optimizer
        )
        states[OUTER] = self

    def expect(self, names: Iterable[str], whole: bool) -> None:
        """Prepare to load a checkpoint with tensors of these names, with or without `outer`."""
        found = [match for name in names if (match := _OF_REPLICA.match(name))]
        replicas = self._outer.replicas
        saved = 1 + max((int(match[1]) for match in found), default=replicas - 1)
        self._own = f"replica_{self._outer.replica % saved}."
        self._outer.together = not (whole and any(match[2] for match in found))
        if saved != replicas:
            self._residual = {}
            what = f"{replicas} replicas go on with the {saved} that were saved, taken in turns"
            dropped = ", without what rounding has left of their messages"
            console.info(what + (dropped if self._outer.residual else ""))

    def state_dict(self) -> State:
        """Return the momentum, and this replica's residual and weights."""
        found = {f"momentum.{name}": value for name, value in self._outer.momentum.items()}
        found |= {f"{self._own}residual.{name}": value for name, value in self._residual.items()}
        if not self._outer.together:
            found |= {f"{self._own}weights.{name}": p for name, p in self._outer.parameters.items()}
        return found

    def load_state_dict(self, state: State) -> None:
        """Do nothing: tensors of parameters are loaded in place."""

    def _optimizer_state(self) -> State:
        found = {}
        for name, value in self._optimizers.state_dict().items():
            found[name if name.startswith("param_groups.") else self._own + name] = value
        return found

    def _load_optimizer(self, state: State) -> None:
        own = {name.removeprefix(self._own): value for name, value in state.items()}
        self._optimizers.load_state_dict(own)

    def _load_model(self, state: State) -> None:
        """Take the model; called last, when all other states are loaded."""
        for name, common in self._outer.common.items():
            local_part(common).copy_(local_part(state[name]))
        own = {} if self._outer.together else self._outer.parameters  # which are loaded
        self._model.load_state_dict(state | own)
        self._own, self._residual = f"replica_{self._outer.replica}.", self._outer.residual
