# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Importing torchtitan without the garbage collector."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Import torchtitan in four fifths of the time; the rest is a search for garbage.

    What exists at the end is never searched again: modules live as long as the process. Does
    nothing where torchtitan is loaded already.
    """
    if "torchtitan" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries report at the end what they call leaks
    finally:
        if was_enabled:
            gc.enable()
