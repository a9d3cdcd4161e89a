# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The device that torchtitan binds at import, and its table of devices' FLOP/s."""

import importlib
from collections.abc import Callable
from typing import Any

import torchtitan.tools.utils as titan_utils

DEVICE_HOLDERS = (
    "torchtitan.tools.utils",
    "torchtitan.tools.profiling",
    "torchtitan.components.metrics",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.distributed.utils",
)
"""The modules of torchtitan 0.2.2 that bind ``device_type`` or ``device_module`` at import.

A module missing from this list would try to use a GPU on a machine without one. A test searches for
such modules.
"""

UNKNOWN_PEAK = 312e12
"""The result of torchtitan's `get_peak_flops` for an unknown device (an A100's peak)."""

known_peak_flops: Callable[[str], float] = titan_utils.get_peak_flops
"""torchtitan's own function, saved before `bind_peak_flops` replaces it."""


def bind_peak_flops(peak_flops: Callable[[str], float]) -> None:
    """Make torchtitan call ``peak_flops`` for a device's FLOP/s.

    If upstream reads the peak elsewhere, the MFU of an unknown device is silently computed with an
    A100's peak. This function's test fails first.
    """
    setattr(titan_utils, "get_peak_flops", peak_flops)  # noqa: B010  (a module has no such type)


def bind_device_holders(device_type: str, device_module: Any) -> None:
    """Set another device in all torchtitan modules that store it.

    Args:
        device_type: E.g. ``cpu``.
        device_module: Implements the part of ``torch.cuda``'s interface that torchtitan calls.
    """
    for name in DEVICE_HOLDERS:
        module = importlib.import_module(name)
        for attribute, value in (("device_type", device_type), ("device_module", device_module)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)


def device_type() -> str:
    """Return torchtitan's device type, including a change by `bind_device_holders`."""
    return str(titan_utils.device_type)
