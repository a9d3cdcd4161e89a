# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Finding where the host waits for a device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError or NotImplementedError where the host would wait for the device.

    On CUDA torch watches: reads of values, and copies between pageable memory and the device. A
    ``meta`` tensor has no values, so all that reads one raises by itself.
    """
    if device.type == "meta":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
