# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Running torchtitan without an accelerator.

torchtitan resolves its device once, at import, and falls back to the name ``cuda`` where there
is none. `bind_device` gives the modules that hold that name a CPU device object instead. Only
torchtitan's names are rebound; torch itself is never patched. With an accelerator the only
thing that changes is the answer for a device whose peak FLOP/s nobody knows.
"""

import math
import os
import platform
import resource
import sys
from types import SimpleNamespace

import torch

from torchtitan_lr.compat.titan_trainer import (
    UNKNOWN_PEAK,
    bind_device_holders,
    bind_peak_flops,
    device_type,
    known_peak_flops,
)


class CpuDevice:
    """The part of ``torch.cuda``'s interface that torchtitan calls, for a CPU process."""

    def set_device(self, device: torch.device | int) -> None:
        """Accept any device: a CPU process has only one."""

    def current_device(self) -> int:
        """Return 0, the index `torch.distributed.barrier` accepts under gloo."""
        return 0

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Return at once: CPU work is never queued."""

    def empty_cache(self) -> None:
        """Do nothing: there is no caching allocator to empty."""

    def get_device_name(self, device: torch.device | int | None = None) -> str:
        """Return the processor's name."""
        return f"CPU {platform.processor() or platform.machine()}"

    def get_device_properties(self, device: torch.device | int | None = None) -> SimpleNamespace:
        """Return an object whose ``total_memory`` is the machine's memory in bytes."""
        return SimpleNamespace(
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    def memory_stats(self, device: torch.device | int | None = None) -> dict[str, int]:
        """Return the peak resident set of this process under the keys torchtitan reads, in bytes.

        The kernel keeps one peak for the life of a process, so `reset_peak_memory_stats` cannot
        lower it.
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = peak if sys.platform == "darwin" else peak * 1024
        return {
            "active_bytes.all.peak": peak_bytes,
            "reserved_bytes.all.peak": peak_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        """Do nothing: see `memory_stats`."""


def has_accelerator() -> bool:
    """Return whether this process can compute on a CUDA (or ROCm) or XPU device."""
    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def peak_flops(device_name: str) -> float:
    """Return the peak bf16 FLOP/s of a device, NaN where it is unknown.

    torchtitan answers an A100's peak for every device it does not know, which would make MFU a
    plausible lie.

    Args:
        device_name: As the driver reports it.
    """
    if not has_accelerator():
        return math.nan
    known = known_peak_flops(device_name)
    return math.nan if known == UNKNOWN_PEAK and "A100" not in device_name else known


def bind_device() -> str:
    """Make torchtitan use the device that exists; call before a Trainer is built.

    Returns:
        The device type: ``cuda``, ``xpu`` or ``cpu``.
    """
    bind_peak_flops(peak_flops)
    if not has_accelerator():
        bind_device_holders("cpu", CpuDevice())
    return device_type()
