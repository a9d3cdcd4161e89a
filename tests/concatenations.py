# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Counts how often weights are put side by side."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)


class Concatenations(TorchDispatchMode):
    """Counts concatenations of what has the shapes of weights: the weights, or a product of each.

    Args:
        weights: The weights; no other tensors that are concatenated may have their shapes.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(weight.shape) for weight in weights}
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _JOINS:
            self.calls += all(tuple(part.shape) in self.shapes for part in args[0])
        return func(*args, **(kwargs or {}))
