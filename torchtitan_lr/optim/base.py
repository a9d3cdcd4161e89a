# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the package's own optimizers have in common."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_lr.compat.dtensor import local_part


class OwnOptimizer(Optimizer):
    """An optimizer that makes its state in the constructor, and leaves out a rejected step itself.

    The state is in fp32 or wider, and never reallocated.
    """

    found_inf: Tensor | None = None
    """1 if the next step must not change weights and state, else 0, as torch's fused Adam has it:
    an fp32 scalar on the device, equal on all ranks. None if every step counts."""
    takes_verdict = True

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


def split_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split the indices of entries into buckets of at most ``limit`` elements, or one larger."""
    result: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not result or size > room:
            result.append([])
            room = limit
        result[-1].append(index)
        room -= size
    return result
