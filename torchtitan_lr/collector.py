# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Importing torch without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import faster: a fifth of torchtitan's import is a search for garbage, which it has not."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
