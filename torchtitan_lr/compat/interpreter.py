# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Python's interpreter: garbage collection during imports, exit functions, ends of processes."""

import atexit
import ctypes
import gc
import multiprocessing.queues
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection while torchtitan is imported, which takes a fifth of the time.

    Modules live as long as the process: what exists at the end is never collected.
    """
    if "torchtitan" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries report leaks at exit
    finally:
        if was_enabled:
            gc.enable()


run_exit_functions: Callable[[], None] = atexit._run_exitfuncs
"""Runs the registered `atexit` functions now, so that none is left at the end of the process.

A finished rank exits without interpreter shutdown, because a background thread of torch (seen in
torch 2.11 and 2.13) may crash during shutdown. Python has no public name for this (seen in Python
3.10 to 3.13).
"""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a stop signal end this process at once: Python handles none while a library works."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # The kernel drops such a signal for the first process of a container: its handler stays.
    if threading.current_thread() is not threading.main_thread() or os.getpid() == 1:
        yield
        return
    handlers = {n: found for n in numbers if callable(found := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def cores() -> int:
    """Return the number of cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, or has died (Linux only)."""
    if sys.platform != "linux":
        return
    # The kernel tracks the thread that forked this process: that thread must not end earlier.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


_PR_SET_PDEATHSIG = 1

# Loaded before any fork: a child must not load libraries between fork and exec.
_LIBC = ctypes.CDLL(None)


def begin_worker(parent: int, worker: int) -> None:
    """Let this worker process end with its parent, and if it cannot send what it has made.

    A worker whose read never returns does not see that its parent has ended. And Python would print
    an error of sending and drop the message, for which the parent waits.
    """
    end_with(parent)

    def end(error: Exception, message: object) -> None:
        print(f"error: worker {worker} cannot send: {error}", file=sys.stderr, flush=True)
        os._exit(1)

    # What the queue's thread calls, for subclasses to replace (seen in Python 3.10 to 3.13).
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(end)
