# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CPU support for torchtitan, and peak FLOP/s.

torchtitan resolves its device once, at import, to ``cuda`` without an accelerator. `bind_device`
rebinds torchtitan's names, never torch's; with an accelerator only unknown devices' peak FLOP/s.
"""

import ctypes
import math
import os
import platform
import resource
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch
import torchtitan.tools.utils as titan_utils

UNKNOWN_PEAK = 312e12
"""The result of torchtitan's `get_peak_flops` for an unknown device (an A100's peak)."""

known_peak_flops: Callable[[str], float] = titan_utils.get_peak_flops
"""torchtitan's own function, saved before `bind_device` replaces it."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of glibc's ``mallopt``, by malloc.h

# A user who sets one of these decides about malloc.
_MALLOC_VARIABLES = {"GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}


def _cpu_memory_stats(_: object = None) -> dict[str, int]:
    """Return the peak resident set size of this process in bytes, under torchtitan's keys."""
    # The kernel keeps one peak per process lifetime, so nothing can reset it.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    same = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), peak)
    return same | {"num_alloc_retries": 0, "num_ooms": 0}


CPU_DEVICE = SimpleNamespace(
    # A CPU process has one device, no queue and no caching allocator.
    **dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), lambda _=None: None
    ),
    current_device=lambda: 0,  # gloo's barrier takes no other index
    get_device_name=lambda _=None: f"CPU {platform.processor() or platform.machine()}",
    get_device_properties=lambda _=None: SimpleNamespace(
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ),
    memory_stats=_cpu_memory_stats,
)
"""The part of ``torch.cuda``'s interface that torchtitan calls, for a CPU process."""


def has_accelerator() -> bool:
    """Return whether a GPU of CUDA or ROCm is available."""
    return torch.cuda.is_available()


def peak_flops(device_name: str) -> float:
    """Return the peak bf16 FLOP/s of a device, NaN if it is unknown."""
    if not has_accelerator():
        return math.nan
    # torchtitan returns an A100's peak for every unknown device: a wrong but plausible MFU.
    known = known_peak_flops(device_name)
    return math.nan if known == UNKNOWN_PEAK and "A100" not in device_name else known


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next step, and not for other processes."""
    # By default it returns large tensors to the kernel, which gives empty pages, one fault per
    # 4 KiB, to the tensors of the next step. In a virtual machine the faults can take most of a
    # step.
    if platform.libc_ver()[0] != "glibc" or not _MALLOC_VARIABLES.isdisjoint(os.environ):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)


def bind_device() -> str:
    """Make torchtitan use the device, and keep memory on a CPU; call it before a Trainer."""
    # If upstream reads the peak FLOP/s elsewhere, the MFU of an unknown device is silently computed
    # with an A100's peak; a test fails first.
    setattr(titan_utils, "get_peak_flops", peak_flops)  # noqa: B010  (a module has no such type)
    if not has_accelerator():
        for module, name in device_holders():
            setattr(module, name, "cpu" if name == "device_type" else CPU_DEVICE)
        keep_freed_memory()
    return device_type()


def device_holders() -> list[tuple[ModuleType, str]]:
    """Return the loaded modules of torchtitan that bind its device, with the names there."""
    # Modules that are loaded later copy the name of `titan_utils`.
    names = ("device_type", "device_module")
    ours = [module for key, module in sys.modules.items() if key.startswith("torchtitan.")]
    return [(module, name) for module in ours for name in names if name in vars(module)]


def device_type() -> str:
    """Return torchtitan's device type, including a change by `bind_device`."""
    return str(titan_utils.device_type)
