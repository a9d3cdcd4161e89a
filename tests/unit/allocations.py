# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a function allocates on the CPU, from torch's own allocator.

A `TorchDispatchMode` does not see the copies that a kernel makes of its inputs.
"""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function):
    """Bytes at the peak of a function, beyond those in front of it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    living = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            living += event.nbytes()
            peak = max(peak, living)
    return peak
