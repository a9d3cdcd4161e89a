# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The running part of the model and the running pass.

Forward hooks record the part, and the sequence numbers of the autograd nodes that it creates. In
backward the running node's number identifies the part, also of compiled and checkpointed blocks.
FSDP2 prefetches weights, so its calls are attributed to the parameters' owner.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan_lr.compat import autograd
from torchtitan_lr.compat.dispatch import tree_leaves
from torchtitan_lr.compat.fsdp import wrap_unit_calls

STEP = "step"  # scope of all calls outside the model and its loss: clipping, TSR-Adam, logging
OUTER = "outer"  # scope of the exchanges of replicas that train apart
OPTIMIZER = "optimizer"  # scope of the calls in the step of an optimizer that the ledger was given

LOSS = "loss"
"""Scope of the calls between the end of the model's forward and the start of its backward."""


class ScopeTracker:
    """Follows a model, or a stage without its ends, through forward and backward until closed."""

    def __init__(
        self, model_parts: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()
    ) -> None:
        self.hooks = ExitStack()
        keep = self.hooks.enter_context  # a handle, which is removed at the end
        self._in_optimizer = False
        self.outside = STEP
        self.reducing = False
        self._stack: list[str] = []
        self._ranges: list[tuple[int, int, str]] = []
        self._model_ends: list[int] = []
        self._owner: str | None = None
        self._last = STEP
        self._in_loss = False
        self._recomputing = 0
        for part in model_parts:
            # The root before its children: the loss is between the end of the root's forward and
            # its backward. The root's own parameter is the final norm's.
            keep(part.register_forward_hook(self._end_model))
            self._own_unit(part, "head")
            self._follow("embedding", getattr(part, "tok_embeddings", None))
            for name, block in part.get_submodule("layers").named_children():
                self._follow(f"block {name}", block)
            self._follow("head", getattr(part, "output", None))

        for optimizer in optimizers:
            keep(optimizer.register_step_pre_hook(lambda *_: self._step(True)))
            keep(optimizer.register_step_post_hook(lambda *_: self._step(False)))

    @property
    def in_unit(self) -> bool:
        """Whether FSDP2 runs, for a unit of its own."""
        return self._owner is not None

    def here(self) -> tuple[str, str, bool]:
        """Return scope, pass (forward, backward, optimizer), and whether it is a recomputation."""
        if self._in_optimizer:
            return OPTIMIZER, "optimizer", False
        if autograd.backward_number() is not None:
            number = autograd.running_node_number()
            if self._owner is None and number is not None:
                # The last range first: a later micro-batch's numbers are larger.
                owners = (scope for a, b, scope in reversed(self._ranges) if a <= number < b)
                in_loss = bool(self._model_ends) and number >= self._model_ends[0]
                self._last = next(owners, LOSS if in_loss else self._last)
            return self._owner or self._last, "backward", self._recomputing > 0
        if self._owner or self._stack:
            return self._owner or self._stack[-1], "forward", False
        return (LOSS, "forward", False) if self._in_loss else (self.outside, "optimizer", False)

    def _step(self, runs: bool) -> None:
        self._in_optimizer = runs

    def _end_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._in_loss = True
        self._model_ends.append(autograd.next_node_number())
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leave = leaf.register_hook(lambda _: setattr(self, "_in_loss", False))
                self.hooks.enter_context(leave)

    def _follow(self, scope: str, module: nn.Module | None) -> None:
        if module is None:
            return
        starts: list[int] = []

        def before(*_: Any) -> None:
            self._in_loss = False
            self._stack.append(scope)
            starts.append(autograd.next_node_number())

        def after(*_: Any) -> None:
            self._stack.pop()
            self._ranges.append((starts.pop(), autograd.next_node_number(), scope))

        # Before FSDP's hook, which creates the node that reduces the gradients.
        keep = self.hooks.enter_context
        keep(module.register_forward_pre_hook(before, prepend=True))
        keep(module.register_forward_hook(after))
        self._own_unit(module, scope)
        for inner in autograd.checkpointed_modules(module):
            keep(inner.register_forward_pre_hook(lambda *_: self._recompute(1)))
            # Recomputation may stop early with an exception.
            keep(inner.register_forward_hook(lambda *_: self._recompute(-1), always_call=True))

    def _recompute(self, change: int) -> None:
        # The first forward pass runs the inner module too.
        self._recomputing += change * (autograd.backward_number() is not None)

    def _own_unit(self, module: nn.Module, scope: str) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def owned(*args: Any, **kwargs: Any) -> Any:
                outer = self._owner, self.reducing
                self._owner, self.reducing = scope, original.__name__ == "post_backward"
                try:
                    return original(*args, **kwargs)
                finally:
                    self._owner, self.reducing = outer

            return owned

        self.hooks.callback(wrap_unit_calls(module, wrap))
