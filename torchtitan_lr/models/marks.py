# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Results that low-rank activation checkpointing saves.

The edges of the model compute by `save` what backward must not compute twice: the r-wide latents,
with the collective behind them, and the norms' statistics. Without low-rank checkpointing `save`
only calls its argument.

Torch's selective checkpointing saves the results of chosen operators. Outside of compiled code it
repeats whatever leads to them: the product in front of a saved all-reduce would run again for
nothing, or its result would have to be saved too. It also frees them after the first recomputation,
and a split backward needs two. A `Tape` therefore saves the results of whole computations.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchtitan_lr.compat.autograd import version_of
from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS, TorchDispatchMode, lower_as_identity

T = TypeVar("T", bound=tuple[Any, ...])

_library = torch.library.Library("torchtitan_lr", "FRAGMENT")
_library.define("keep(Tensor x) -> Tensor")
_library.impl("keep", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd("torchtitan_lr::keep", lambda ctx, gradient: gradient, lib=_library)

_marks_in_graphs = False
_thread = threading.local()


def save(compute: Callable[[], T]) -> T:
    """Compute tensors that backward takes from forward when it recomputes the rest.

    Call it where autograd records nothing: in the forward of an autograd Function.

    Args:
        compute: Returns a tuple of tensors. Its other effects happen in forward only.

    Returns:
        The tensors. In a compiled graph they are behind an operator ``torchtitan_lr::keep``, which
        costs nothing: there the compiler drops what only leads to saved tensors.
    """
    if torch.compiler.is_compiling():
        made = compute()
        return tuple(torch.ops.torchtitan_lr.keep(x) for x in made) if _marks_in_graphs else made  # type: ignore[return-value]
    tape: Tape | None = getattr(_thread, "tape", None)
    return compute() if tape is None else tape.take(compute)


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the marks, and cost nothing there."""
    global _marks_in_graphs
    _marks_in_graphs = True
    lower_as_identity(torch.ops.torchtitan_lr.keep.default)


class Tape:
    """What one forward pass of a block saved, in order.

    Args:
        attention: Whether the results of fused attention are saved too.
    """

    def __init__(self, attention: bool) -> None:
        self.attention = _SavedAttention() if attention else None
        self.results: list[tuple[tuple[Any, ...], list[int]]] = []
        self.place: int | None = None

    def take(self, compute: Callable[[], T]) -> T:
        """Compute and save, in forward; return the saved tensors, in a recomputation.

        Raises:
            RuntimeError: A saved tensor was changed in place since.
        """
        if self.place is None:
            made = compute()
            self.results.append((_aliases(made), _versions(made)))
            return made
        saved, versions = self.results[self.place]
        if _versions(saved) != versions:
            raise RuntimeError("a tensor that low-rank checkpointing saves was changed in place")
        self.place += 1
        return _aliases(saved)  # type: ignore[return-value]

    def recording(self) -> AbstractContextManager[None]:
        """Return a context in which `save` saves, for the forward pass."""
        return self._running(None)

    def replaying(self) -> AbstractContextManager[None]:
        """Return a context in which `save` returns what was saved, for a recomputation."""
        return self._running(0)

    @contextmanager
    def _running(self, place: int | None) -> Iterator[None]:
        outer = getattr(_thread, "tape", None)
        self.place, _thread.tape = place, self
        try:
            with nullcontext() if self.attention is None else self.attention:
                yield
        finally:
            _thread.tape = outer


class _SavedAttention(TorchDispatchMode):
    """Saves attention's output and log-sum-exp: the operator has an autograd formula of its own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ATTENTION_OPERATORS:
            return save(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _aliases(made: tuple[Any, ...]) -> tuple[Any, ...]:
    # Autograd writes into the tensors that a Function returns; the memory is the same.
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in made)


def _versions(made: tuple[Any, ...]) -> list[int]:
    return [version_of(x) for x in made if isinstance(x, Tensor)]
