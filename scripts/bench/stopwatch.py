# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The time of a call on a CPU or on a GPU."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch


def median_ms(
    run: Callable[[], object],
    device: str,
    steps: int,
    warmup: int = 3,
    together: Callable[[], object] | None = None,
) -> float:
    """Return the median time of a call in milliseconds.

    On a GPU the calls are queued one behind the other, with an event between two of them, and the
    host waits once at the end. A synchronization per call would add the time that the host needs to
    launch the first kernels; here the device is idle only if the host is slower than the device.

    Args:
        run: The call.
        device: ``cpu`` or ``cuda``.
        steps: Number of timed calls.
        warmup: Number of calls before them.
        together: Waits for the other ranks; on a CPU before each call, on a GPU before the first.
    """
    for _ in range(warmup):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
        if together is not None:
            together()
        return median(_on_gpu(run, steps))
    times = []
    for _ in range(steps):
        if together is not None:
            together()
        begin = time.perf_counter()
        run()
        if together is not None:
            together()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


def _on_gpu(run: Callable[[], object], steps: int) -> list[float]:
    """Return the milliseconds between the ends of successive calls."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]
