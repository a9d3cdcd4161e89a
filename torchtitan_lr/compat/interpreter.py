# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Python's interpreter: importing torchtitan without the collector, ending without a teardown."""

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


def run_exit_functions() -> None:
    """Run what `atexit` has registered, now; at the end of the process nothing is left of it.

    A rank that has done its work ends without a teardown: now and then a thread of torch's
    libraries (seen in torch 2.11 and 2.13) still runs when the interpreter destroys it. Python has
    no public name for this: ``atexit._run_exitfuncs``, seen in Python 3.10 to 3.13. If it goes,
    every rank ends with an AttributeError after its work.
    """
    atexit._run_exitfuncs()
