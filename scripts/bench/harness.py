# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Timing for all benchmarks, on `torch.utils.benchmark`: a call alone, or several in turn.

Wall time of a call includes its kernels: the timer waits for the device. Several calls take turns,
so that a change of the machine's load meets all of them; a ratio is the median of the ratios of
each turn, which is steadier than the ratio of two medians.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils.benchmark import Timer

Call = Callable[[], object]

CALLS = 3
"""Timed calls of a turn; torch's timer makes two untimed ones before them."""


def timer_of(call: Call) -> Timer:
    """Return a timer of a call with as many threads as torch uses now."""
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def median_ms(
    call: Call, device: str, repeats: int, warmup: int = 3, together: Call | None = None
) -> float:
    """Return the median milliseconds of a call.

    Args:
        call: The call.
        device: ``cpu`` or ``cuda``. On a GPU each measurement is a queue of calls with one wait at
            its end: a wait per call would add the time that the host needs to launch kernels.
        repeats: Number of measurements, about.
        warmup: Number of calls before them.
        together: Waits for the other ranks after each call.
    """

    def joined() -> None:
        call()
        if together is not None:
            together()

    timer, number = timer_of(joined), 1 if device == "cpu" else 5
    for _ in range(warmup):
        joined()
    once = timer.timeit(number).mean
    return 1e3 * timer.blocked_autorange(min_run_time=repeats * number * once).median


@dataclass(frozen=True)
class Timed:
    """The seconds of a call over its turns, beside those of the first call."""

    seconds: list[float]  # of each turn
    ratios: list[float]  # the first call's over this one's: above 1 this one is faster

    def as_dict(self) -> dict[str, Any]:
        """Return medians and the ratios' quartiles, for JSON."""
        low, high = self.ratios[0], self.ratios[0]
        if len(self.ratios) > 1:
            low, _, high = quantiles(self.ratios, n=4)
        ms = 1e3 * median(self.seconds)
        return {"ms": ms, "speed_up": median(self.ratios), "quartiles": [low, high]}


def in_turns(calls: Mapping[str, Call], turns: int, warmup: int = 3) -> dict[str, Timed]:
    """Time calls in turn, A B C A B C ...

    Args:
        calls: The calls by name; ratios are to the first.
        turns: Measurements of each.
        warmup: Untimed calls of each.
    """
    timers = {name: timer_of(call) for name, call in calls.items()}
    for call in calls.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, timer in timers.items():
            seconds[name].append(timer.timeit(CALLS).mean)
    first = next(iter(seconds.values()))
    return {
        name: Timed(found, [a / b for a, b in zip(first, found, strict=True)])
        for name, found in seconds.items()
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return what a table says of the machine of a device, ``cpu`` or ``cuda``."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    threads, load = torch.get_num_threads(), round(os.getloadavg()[0], 1)
    return {"machine": name, "torch": torch.__version__, "threads": threads, "load": load}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def timed_rows(calls: Mapping[str, Call], turns: int) -> Iterator[dict[str, Any]]:
    """Time calls in turns; yield a row each, and a row with the reason for one that fails."""
    working: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            call()
            working[name] = call
        except (RuntimeError, TypeError, NotImplementedError, OSError) as error:
            yield {"how": name, "failed": str(error).partition("\n")[0][:160]}
    if working:
        for name, found in in_turns(working, turns, warmup=1).items():
            yield {"how": name, **found.as_dict()}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |found - exact| / |exact|, by Frobenius norms in fp64."""
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())
