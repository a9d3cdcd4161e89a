# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the package's own optimizers have in common."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_lr.compat.dtensor import local_part


class OwnOptimizer(Optimizer):
    """An optimizer that leaves out a rejected step itself, on the device.

    Its constructor makes all state, in fp32 or wider.
    """

    found_inf: Tensor | None = None
    """1 if the next step must not change weights and state, else 0, as torch's fused Adam has it:
    an fp32 scalar on the device, equal on all ranks. None if every step counts."""
    takes_verdict = True

    def update(self, rejected: Tensor) -> None:
        """Update all parameters, unless the step is rejected (a bool on the device)."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; return the closure's loss, None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.found_inf is not None:
            self.update(self.found_inf > 0)
        else:
            device = local_part(self.param_groups[0]["params"][0]).device
            self.update(torch.zeros((), dtype=torch.bool, device=device))
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters after the constructor, which makes state and messages of all."""
        if self.state:
            raise ValueError("parameters cannot be added; build another optimizer of all of them")
        super().add_param_group(param_group)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the existing tensors; the hyperparameters stay the configured ones."""
        # Torch's would replace the tensors, and cast them to the dtype of their parameter.
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(ids, own, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                state = local_part(self.state[parameter][name])
                state.copy_(local_part(torch.as_tensor(value)))


Item = TypeVar("Item")


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Divide items into lists of those that have equal keys, in the order of their first ones."""
    found: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())


def split_buckets(items: Sequence[Item], sizes: Sequence[int], limit: int) -> list[list[Item]]:
    """Split items into buckets of at most ``limit`` elements together, or one larger item."""
    result: list[list[Item]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not result or size > room:
            result.append([])
            room = limit
        result[-1].append(item)
        room -= size
    return result
