# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Finding where the host waits for a device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """Raise where the host would wait for the device; on ``meta`` a read raises by itself."""
    if device.type == "meta":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
