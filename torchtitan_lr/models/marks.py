# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Marking the tensors that low-rank activation checkpointing keeps.

The model and the edges of the parallel plans call `keep` on what must not be computed twice: the
r-wide latents, and what a collective brought. Without low-rank checkpointing a mark is nothing.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dispatch import lower_as_identity

_library = torch.library.Library("torchtitan_lr", "FRAGMENT")
_library.define("keep(Tensor x) -> Tensor")
_library.impl("keep", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd("torchtitan_lr::keep", lambda ctx, gradient: gradient, lib=_library)

_marks_in_graphs = False
_listener = threading.local()


def keep(x: Tensor) -> Tensor:
    """Mark a tensor as one to keep for backward when the rest is recomputed.

    Args:
        x: Any tensor that an operator of this block made; its whole storage is kept.

    Returns:
        The same tensor. In a compiled graph, the same values behind an operator
        ``torchtitan_lr::keep``, which costs nothing: use this one from here on, and save this one.
    """
    if torch.compiler.is_compiling():
        marked: Tensor = torch.ops.torchtitan_lr.keep(x) if _marks_in_graphs else x
        return marked
    listener = getattr(_listener, "callback", None)
    if listener is not None:
        listener(x)
    return x


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the marks, and cost nothing there."""
    global _marks_in_graphs
    _marks_in_graphs = True
    lower_as_identity(torch.ops.torchtitan_lr.keep.default)


@contextmanager
def listen(callback: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call ``callback`` with every tensor that this thread marks, outside of compiled code."""
    previous = getattr(_listener, "callback", None)
    _listener.callback = callback
    try:
        yield
    finally:
        _listener.callback = previous
