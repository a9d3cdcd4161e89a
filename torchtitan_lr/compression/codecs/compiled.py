# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fusing the element-wise parts of a codec into one kernel each, where kernels are launched."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for accelerators; on a CPU it runs as written.

    Sizes and integers stay symbolic: seeds differ in every step and must not recompile anything.

    Args:
        function: Its first argument is a tensor; of Python values it takes integers only.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*args: Any) -> Any:
        return (function if args[0].device.type == "cpu" else compiled())(*args)

    return call
