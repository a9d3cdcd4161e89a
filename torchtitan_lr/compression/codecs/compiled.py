# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compilation of the element-wise parts of a codec to one kernel each, on accelerators."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def fused(function: F) -> F:
    """Compile a function for accelerators; on a CPU it runs uncompiled.

    Sizes and integers stay symbolic: seeds differ in every step and must not cause recompilation.

    Args:
        function: Its first argument is a tensor; of Python values it takes integers only.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*args: Any) -> Any:
        return (function if args[0].device.type == "cpu" else compiled())(*args)

    return cast(F, call)
