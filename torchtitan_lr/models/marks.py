# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Results that low-rank activation checkpointing saves, and the recomputation of the rest.

The edges of the model compute by `save` what backward must not compute twice: the r-wide latents,
with the collective behind them, and the norms' statistics. Without low-rank checkpointing `save`
only calls its argument.

Torch's selective checkpointing saves the results of chosen operators. Outside of compiled code it
repeats whatever leads to them: the product in front of a saved all-reduce would run again for
nothing, or its result would have to be saved too. It also frees them after the first recomputation,
and a split backward needs two. A `Recomputation` therefore saves the results of whole computations.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchtitan_lr.compat.autograd import version_of
from torchtitan_lr.compat.compiler import lower_as_identity
from torchtitan_lr.compat.dispatch import (
    ATTENTION_OPERATORS,
    FLEX_ATTENTION,
    FLEX_ATTENTION_CALL,
    TorchDispatchMode,
    tree_map_only,
)

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
        The tensors; in a compiled graph behind `keep`, which costs nothing: there the compiler
        drops what only leads to saved tensors.

    Raises:
        RuntimeError: In backward, a saved tensor was changed in place since.
    """
    if torch.compiler.is_compiling():
        made: Any = compute()
        if _marks_in_graphs:
            made = tuple(torch.ops.torchtitan_lr.keep(x) for x in made)
        return made
    running: Recomputation | None = getattr(_thread, "running", None)
    if running is None:
        return compute()
    if running.kept_next is None:
        made = compute()
        versions = [version_of(x) for x in made if isinstance(x, Tensor)]
        # Aliases: autograd writes into the tensors that a Function returns.
        running.kept.append((tree_map_only(Tensor, Tensor.detach, made), versions))
        return made
    saved, versions = running.kept[running.kept_next]
    if [version_of(x) for x in saved if isinstance(x, Tensor)] != versions:
        raise RuntimeError("a tensor that low-rank checkpointing saves was changed in place")
    running.kept_next += 1
    return tree_map_only(Tensor, Tensor.detach, saved)


def end_recomputation(*last: Tensor | None) -> None:
    """End a recomputation that needs only these tensors: backward does not need what they yield.

    Call it in the forward of an autograd Function before its product, with what the Function saves.
    Autograd itself collects that only afterwards: the block's last product would run for nothing.
    """
    running = None if torch.compiler.is_compiling() else getattr(_thread, "running", None)
    if running is None or running.kept_next is None:
        return
    found = [x.detach() for x in last if x is not None]
    recorded = any(x is not None and x.requires_grad for x in last)
    if recorded and len(running.collected) + len(found) == len(running.shapes):
        running.collected += found
        raise _AllFound


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the marks, and cost nothing there."""
    global _marks_in_graphs
    _marks_in_graphs = True
    lower_as_identity(torch.ops.torchtitan_lr.keep.default)


class _SavedAttention(TorchDispatchMode):
    """Saves attention's output and log-sum-exp: the operator has an autograd formula of its own."""

    # Else torch would run the compiled ``flex_attention`` uncompiled, with all scores in memory.
    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (*ATTENTION_OPERATORS, FLEX_ATTENTION, FLEX_ATTENTION_CALL):
            return save(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class _AllFound(Exception):
    """Ends a recomputation."""


class Recomputation:
    """A forward pass whose saved tensors are computed again when backward needs the first of them.

    All calls of a backward share one recomputation.

    Args:
        function: Called in forward, and again in backward until the last saved tensor is there.
        args: Its positional arguments, which are kept.
        kwargs: Its keyword arguments.
        save_attention: Whether the results of fused attention are saved too.

    Attributes:
        kept: The results that `save` keeps, and how often each had been changed in place.
        kept_next: In backward, the next of them; None in forward.
        shapes: Of the tensors that autograd saves, with their dtypes.
        collected: In backward, those of them that the present recomputation has reached.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        save_attention: bool = False,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.kept: list[tuple[Any, list[int]]] = []
        self.kept_next: int | None = None
        self._attention: AbstractContextManager[Any] = (
            _SavedAttention() if save_attention else nullcontext()
        )
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.collected: list[Tensor] = []
        self._found: dict[int, Tensor] = {}

    def forward(self) -> Any:
        """Run the function; autograd gets numbers in place of the tensors that it saves."""

        def pack(x: Tensor) -> int:
            self.shapes.append((x.shape, x.dtype))
            return len(self.shapes) - 1

        with saved_tensors_hooks(pack, self._unpack):
            return self._run(None, self.args, self.kwargs)

    def _run(self, kept_next: int | None, args: Any, kwargs: Any) -> Any:
        outer = getattr(_thread, "running", None)
        self.kept_next, _thread.running = kept_next, self
        try:
            with self._attention:
                return self.function(*args, **kwargs)
        finally:
            _thread.running = outer

    def _unpack(self, number: int) -> Tensor:
        """Return a tensor that autograd saved, after a recomputation if it is the first one.

        Raises:
            RuntimeError: The recomputation saves other tensors than the forward pass did.
        """
        if number in self._found:
            return self._found.pop(number)
        found = self.collected = []

        def collect(x: Tensor) -> None:
            found.append(x.detach())
            if len(found) == len(self.shapes):
                raise _AllFound

        with torch.enable_grad():
            # A graph of its own. It begins with views, because module hooks (the FLOP counter's)
            # run other operators on leaves than on results.
            args, kwargs = tree_map_only(
                Tensor,
                lambda x: x.detach().requires_grad_().view_as(x) if x.requires_grad else x,
                (self.args, self.kwargs),
            )
            with saved_tensors_hooks(collect, lambda x: x), suppress(_AllFound):
                self._run(0, args, kwargs)
        if [(x.shape, x.dtype) for x in found] != self.shapes:
            raise RuntimeError(
                "low-rank checkpointing: the recomputation took another path than the forward "
                "pass; was it under a context, such as sdpa_kernel, that ended?"
            )
        # ``torch.utils.checkpoint`` finds them anew for every call of autograd. The weights' half
        # of a split backward is one call per linear: a block would run as often, and what each
        # call leaves would stay until the last.
        self._found, self.collected = dict(enumerate(found)), []
        return self._found.pop(number)
