# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank checkpointing of a block: what backward reuses of forward, and how it runs again.

Autograd Functions compute by `keep` what backward must not compute twice: the r-wide latents, with
the collective behind them, and the norms' statistics. Otherwise `keep` only calls its argument.

Torch's selective checkpointing saves the results of chosen operators and, outside of compiled code,
repeats whatever leads to them: the product in front of a saved all-reduce would run again for
nothing. It also frees them after the first recomputation, and a split backward needs two. A
`Recomputation` keeps the results of whole computations.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


class _Thread(threading.local):
    running: "Recomputation | None" = None  # what `keep` asks in this thread


_thread = _Thread()
_marks_in_graphs = False

_library = torch.library.Library("torchtitan_lr", "FRAGMENT")
_library.define("keep(Tensor x) -> Tensor")
_library.impl("keep", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd("torchtitan_lr::keep", lambda ctx, gradient: gradient, lib=_library)

# Policies of compiled blocks, by whether attention's results are saved.
_KEPT = torch.ops.torchtitan_lr.keep.default
_COMPILED_SAVES = {
    False: partial(create_selective_checkpoint_contexts, [_KEPT]),
    True: partial(
        create_selective_checkpoint_contexts, [_KEPT, *ATTENTION_OPERATORS, FLEX_ATTENTION]
    ),
}


def keep(compute: Callable[[], T]) -> T:
    """Compute tensors that backward reuses when it recomputes the rest."""
    # Call it where autograd records nothing: in the forward of an autograd Function. In a compiled
    # graph the compiler drops what only leads to the operator ``torchtitan_lr::keep``.
    if torch.compiler.is_compiling():
        made: Any = compute()
        if _marks_in_graphs:
            made = tuple(torch.ops.torchtitan_lr.keep(x) for x in made)
        return made
    running = _thread.running
    return compute() if running is None else running.keep(compute)


def end_recomputation(*last: Tensor | None) -> None:
    """Stop recomputing here if backward only still needs these tensors."""
    # Call it in the forward of a Function before its product, with what the Function saves.
    # Autograd collects that only afterwards: the block's last product would run for nothing.
    running = None if torch.compiler.is_compiling() else _thread.running
    if running is not None:
        running.end_with([x for x in last if x is not None])


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the operator ``keep``, at no cost."""
    global _marks_in_graphs
    _marks_in_graphs = True
    lower_as_identity(_KEPT)


def checkpoint_block(
    block: Callable[..., Any],
    *args: Any,
    save_attention: bool,
    save_attention_compiled: bool,
    **kwargs: Any,
) -> Any:
    """Run a block, or a part of one; its backward recomputes everything but what it saves."""
    if torch.compiler.is_compiling():
        # The compiler removes operators whose results only saved tensors use.
        return checkpoint(
            block,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # a block draws no random numbers
            context_fn=_COMPILED_SAVES[save_attention_compiled],
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    return Recomputation(block, args, kwargs, save_attention).forward()


class _SavedAttention(TorchDispatchMode):
    """Saves attention's output and log-sum-exp; attention is one operator with its own backward."""

    # Without support torch would run ``flex_attention`` uncompiled, with all scores in memory.
    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (*ATTENTION_OPERATORS, FLEX_ATTENTION, FLEX_ATTENTION_CALL):
            return keep(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class _AllFound(Exception):
    """Ends a recomputation."""


class Recomputation:
    """A forward pass that runs again, once, when backward needs the first of its saved tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        save_attention: bool = False,
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._save_attention = save_attention
        # The kept results, and how often each had been changed in place.
        self._kept: list[tuple[Any, list[int]]] = []
        self._left: Iterator[tuple[Any, list[int]]] | None = None  # in backward, those to come
        # Of the tensors that autograd saves: forward notes their shapes, and backward collects the
        # tensors, until autograd has asked for each.
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._collected: list[Tensor] = []
        self._found: dict[int, Tensor] = {}

    def forward(self) -> Any:
        """Run the function; autograd gets numbers in place of the tensors that it saves."""

        def pack(x: Tensor) -> int:
            self._shapes.append((x.shape, x.dtype))
            return len(self._shapes) - 1

        with saved_tensors_hooks(pack, self._unpack):
            return self._run(self._args, self._kwargs)

    def keep(self, compute: Callable[[], T]) -> T:
        """Compute and keep tensors in forward; in backward, return what was kept."""
        if self._left is None:
            made = compute()
            versions = [version_of(x) for x in made if isinstance(x, Tensor)]
            # Aliases: autograd writes into the tensors that a Function returns.
            self._kept.append((tree_map_only(Tensor, Tensor.detach, made), versions))
            return made
        saved, versions = next(self._left)
        if [version_of(x) for x in saved if isinstance(x, Tensor)] != versions:
            raise RuntimeError("a tensor that low-rank checkpointing keeps was changed in place")
        kept: T = tree_map_only(Tensor, Tensor.detach, saved)
        return kept

    def end_with(self, last: list[Tensor]) -> None:
        """Stop recomputing if backward only still needs these tensors of the calling Function."""
        missing = len(self._shapes) - len(self._collected)
        if self._left is None or len(last) != missing:
            return
        if any(x.requires_grad for x in last):  # else the Function would save nothing
            self._collected += [x.detach() for x in last]
            raise _AllFound

    def _run(self, args: Any, kwargs: Any) -> Any:
        outer, _thread.running = _thread.running, self
        try:
            with _SavedAttention() if self._save_attention else nullcontext():
                return self._function(*args, **kwargs)
        finally:
            _thread.running = outer

    def _unpack(self, number: int) -> Tensor:
        """Return a tensor that autograd saved, after a recomputation if it is the first one."""
        # ``torch.utils.checkpoint`` recomputes for every call of autograd. The weights' half of a
        # split backward is one call per linear: a block would run as often, and what each call
        # leaves would stay until the last.
        if number not in self._found:
            self._found = dict(enumerate(self._recompute()))
        return self._found.pop(number)

    def _recompute(self) -> list[Tensor]:
        """Run the function again, up to the last tensor that autograd saved; return all of them."""
        saved = self._collected = list[Tensor]()  # `end_with` adds to it
        self._left = iter(self._kept)

        def collect(x: Tensor) -> None:
            saved.append(x.detach())
            if len(saved) == len(self._shapes):
                raise _AllFound

        def in_a_new_graph(x: Tensor) -> Tensor:
            # A view, because module hooks (the FLOP counter's) run other operators on leaves than
            # on results.
            return x.detach().requires_grad_().view_as(x) if x.requires_grad else x

        with torch.enable_grad():
            args, kwargs = tree_map_only(Tensor, in_a_new_graph, (self._args, self._kwargs))
            with saved_tensors_hooks(collect, lambda x: x), suppress(_AllFound):
                self._run(args, kwargs)
        self._collected = []
        if [(x.shape, x.dtype) for x in saved] != self._shapes:
            raise RuntimeError(
                "low-rank checkpointing: the recomputation took another path than the forward "
                "pass; was it under a context, such as sdpa_kernel, that ended?"
            )
        return saved
