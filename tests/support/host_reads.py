# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the host reads of a device."""

from torch.profiler import ProfilerActivity, profile


def reads(call):
    """How often the host reads a number of the device, below every operator too."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return sum(event.name == "aten::_local_scalar_dense" for event in found.events())
