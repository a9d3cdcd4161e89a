# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What backward reuses of forward when low-rank checkpointing recomputes a block.

Autograd Functions compute by `keep` what backward must not compute twice: the r-wide latents, with
the collective behind them, and the norms' statistics. Otherwise `keep` only calls its argument.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchtitan_lr.compat.compiler import lower_as_identity

T = TypeVar("T", bound=tuple[Any, ...])

_thread = threading.local()
_marks_in_graphs = False

_library = torch.library.Library("torchtitan_lr", "FRAGMENT")
_library.define("keep(Tensor x) -> Tensor")
_library.impl("keep", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd("torchtitan_lr::keep", lambda ctx, gradient: gradient, lib=_library)


def keep(compute: Callable[[], T]) -> T:
    """Compute tensors that backward reuses when it recomputes the rest."""
    # Call it where autograd records nothing: in the forward of an autograd Function. In a compiled
    # graph the compiler drops what only leads to the operator ``torchtitan_lr::keep``.
    if torch.compiler.is_compiling():
        made: Any = compute()
        if _marks_in_graphs:
            made = tuple(torch.ops.torchtitan_lr.keep(x) for x in made)
        return made
    running = getattr(_thread, "running", None)
    return compute() if running is None else running.keep(compute)


def end_recomputation(*last: Tensor | None) -> None:
    """Stop recomputing here if backward only still needs these tensors."""
    # Call it in the forward of a Function before its product, with what the Function saves.
    # Autograd collects that only afterwards: the block's last product would run for nothing.
    running = None if torch.compiler.is_compiling() else getattr(_thread, "running", None)
    if running is not None:
        running.end_with([x for x in last if x is not None])


@contextmanager
def kept_by(recomputation: Any) -> Iterator[None]:
    """Let `keep`, in this thread, call the ``keep`` of a `Recomputation`."""
    outer, _thread.running = getattr(_thread, "running", None), recomputation
    try:
        yield
    finally:
        _thread.running = outer


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the operator ``keep``, at no cost."""
    global _marks_in_graphs
    _marks_in_graphs = True
    lower_as_identity(torch.ops.torchtitan_lr.keep.default)
