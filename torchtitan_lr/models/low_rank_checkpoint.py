# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank checkpointing of a block: what it keeps of forward, and how it runs again in backward.

Kept until backward are the block's inputs, and what autograd Functions compute by `keep`: the
latents (b, s, r), behind the collectives that sum and gather them, and the norms' statistics
(b, s); with ``save_attention`` attention's output and log-sum-exp too. When backward needs the
first tensor that autograd saved, the block runs again, once and without FSDP2's hooks: each `keep`
returns what it kept, and everything else is computed again, up to the last tensor that is needed.

Torch's selective checkpointing saves the results of chosen operators and, outside of compiled code,
repeats whatever leads to them: the product in front of a saved all-reduce would run again for
nothing. It also frees them after the first recomputation, and a split backward needs two. So blocks
that are not compiled run as a `Recomputation`, which keeps the results of whole computations.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan_lr.compat import dispatch
from torchtitan_lr.compat.autograd import version_of
from torchtitan_lr.compat.prefix_attention import PREFIX_ATTENTION

T = TypeVar("T", bound=tuple[Any, ...])

_running: "Recomputation | None" = None  # the block that runs, in forward or again in backward
_marks_in_graphs = False

# In a compiled graph the compiler saves what this operator returns, and drops what leads to it.
_library = torch.library.Library("torchtitan_lr", "FRAGMENT")
_library.define("keep(Tensor x) -> Tensor")
_library.impl("keep", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd("torchtitan_lr::keep", lambda ctx, gradient: gradient, lib=_library)

_KEPT = torch.ops.torchtitan_lr.keep.default
_ATTENTION = (*dispatch.ATTENTION_OPERATORS, PREFIX_ATTENTION, dispatch.FLEX_ATTENTION)
_saved = create_selective_checkpoint_contexts
# Policies of compiled blocks, by whether attention's results are saved.
_COMPILED = {False: partial(_saved, [_KEPT]), True: partial(_saved, [_KEPT, *_ATTENTION])}


def keep(compute: Callable[[], T]) -> T:
    """Compute tensors that backward reuses when it recomputes the rest; else only compute them."""
    # Call it where autograd records nothing: in the forward of an autograd Function.
    if torch.compiler.is_compiling():
        made: Any = compute()
        if _marks_in_graphs:
            made = tuple(torch.ops.torchtitan_lr.keep(x) for x in made)
        return made
    return compute() if _running is None else _running.keep(compute)


def end_recomputation(*last: Tensor | None) -> None:
    """Stop recomputing here if backward only still needs these tensors."""
    # Call it in the forward of a Function before its product, with what the Function saves.
    # Autograd collects that only afterwards: the block's last product would run for nothing.
    if not torch.compiler.is_compiling() and _running is not None:
        _running.end_with([x for x in last if x is not None])


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the operator ``keep``, at no cost."""
    global _marks_in_graphs
    _marks_in_graphs = True
    dispatch.lower_as_identity(_KEPT)


def checkpoint_block(
    block: Callable[..., Any], x: Tensor, *args: Any, save_attention: bool, **kwargs: Any
) -> Any:
    """Run a block, or a part of one, on x; its backward recomputes everything but what it keeps."""
    if torch.compiler.is_compiling():
        # Attention counts as an operator that can draw random numbers. To repeat it on a CPU,
        # torch's partitioner saves the generator's state after the DeviceMesh of DTensor
        # parameters, where AOTAutograd expects tensors ("expected all tensors_saved_with_vc_check
        # to be Tensors", seen in torch 2.13 with any checkpointing). Saving attention is exact.
        saves = save_attention or x.device.type == "cpu"
        return checkpoint(
            block,
            x,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # a block draws no random numbers
            context_fn=_COMPILED[saves],
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return block(x, *args, **kwargs)
    return Recomputation(block, (x, *args), kwargs, save_attention).forward()


class _KeepsAttention(dispatch.TorchDispatchMode):
    """Keeps attention's output and log-sum-exp; attention is one operator with its own backward."""

    # Without support torch would run ``flex_attention`` uncompiled, with all scores in memory.
    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (*_ATTENTION, dispatch.FLEX_ATTENTION_CALL):
            return keep(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Complete(Exception):
    """Ends a recomputation: backward has every tensor that it needs."""


class Recomputation:
    """A block's forward pass, which runs again, once, when backward needs what autograd saved."""

    # Autograd saves tensors in forward, and asks for them in backward. Here it gets a number for
    # each in forward, and in backward the tensor that the second run would have saved as this one.

    def __init__(
        self,
        block: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        save_attention: bool = False,
    ) -> None:
        self._block, self._args, self._kwargs = block, args, kwargs
        self._save_attention = save_attention
        # The kept results in the order of the calls, and how often each had been changed in place.
        self._kept: list[tuple[Any, list[int]]] = []
        self._next_kept: Iterator[tuple[Any, list[int]]] | None = None  # in the second run
        # Of the tensors that autograd saves, by number: what forward notes, what the second run has
        # made so far, and what it made that autograd has not asked for yet.
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._remade: list[Tensor] = []
        self._ready: dict[int, Tensor] = {}

    def forward(self) -> Any:
        """Run the block; autograd gets numbers in place of the tensors that it saves."""

        def number_of(x: Tensor) -> int:
            self._shapes.append((x.shape, x.dtype))
            return len(self._shapes) - 1

        with saved_tensors_hooks(number_of, self.saved_tensor):
            return self._run(self._args, self._kwargs)

    def saved_tensor(self, number: int) -> Tensor:
        """Return a tensor that autograd saved; the first one runs the block again."""
        # ``torch.utils.checkpoint`` recomputes for every call of autograd. The weights' half of a
        # split backward is one call per linear: a block would run as often, and what each call
        # leaves would stay until the last.
        if number not in self._ready:
            self._ready = dict(enumerate(self._run_again()))
        return self._ready.pop(number)

    def keep(self, compute: Callable[[], T]) -> T:
        """Compute and keep tensors in forward; in the second run, return what was kept."""
        if self._next_kept is None:
            made = compute()
            # Aliases: autograd writes into the tensors that a Function returns.
            self._kept.append((_aliases(made), _versions(made)))
            return made
        kept, versions = next(self._next_kept)
        if _versions(kept) != versions:
            raise RuntimeError("a tensor that low-rank checkpointing keeps was changed in place")
        return _aliases(kept)

    def end_with(self, last: list[Tensor]) -> None:
        """End the second run if it lacks only these, which the calling Function would save."""
        lacking = len(self._shapes) - len(self._remade)
        saves = any(x.requires_grad for x in last)  # else the Function would save nothing
        if self._next_kept is not None and saves and len(last) == lacking:
            self._remade += [x.detach() for x in last]
            raise _Complete

    def _run(self, args: Any, kwargs: Any) -> Any:
        global _running
        outer, _running = _running, self
        try:
            with _KeepsAttention() if self._save_attention else nullcontext():
                return self._block(*args, **kwargs)
        finally:
            _running = outer

    def _run_again(self) -> list[Tensor]:
        """Run the block up to the last tensor that autograd saved; return all of them."""
        self._remade, self._next_kept = [], iter(self._kept)

        def collect(x: Tensor) -> None:
            self._remade.append(x.detach())
            if len(self._remade) == len(self._shapes):
                raise _Complete

        def in_a_new_graph(x: Tensor) -> Tensor:
            # A view, because module hooks (the FLOP counter's) run other operators on leaves than
            # on results.
            return x.detach().requires_grad_().view_as(x) if x.requires_grad else x

        with torch.enable_grad():
            args, kwargs = dispatch.tree_map_only(
                Tensor, in_a_new_graph, (self._args, self._kwargs)
            )
            with saved_tensors_hooks(collect, lambda x: x), suppress(_Complete):
                self._run(args, kwargs)
        remade, self._remade = self._remade, []
        if [(x.shape, x.dtype) for x in remade] != self._shapes:
            raise RuntimeError(
                "low-rank checkpointing: the recomputation took another path than the forward "
                "pass; was it under a context, such as sdpa_kernel, that ended?"
            )
        return remade


def _aliases(made: T) -> T:
    aliases: T = dispatch.tree_map_only(Tensor, Tensor.detach, made)
    return aliases


def _versions(made: tuple[Any, ...]) -> list[int]:
    return [version_of(x) for x in made if isinstance(x, Tensor)]
