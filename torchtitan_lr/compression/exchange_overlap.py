# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Overlap of compressed exchanges with backward.

An exchange takes longer than a plain reduce-scatter, because it decodes, and must not hold up
backward. On an accelerator, exchanges run on a stream of their own. On a CPU an exchange starts its
collectives and is resumed when the next one starts, or when backward ends. Where FSDP2 reads the
sums at once, an exchange ends before it returns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.autograd import after_backward, backward_number
from torchtitan_lr.compression.codecs import Resumable, Works, complete

Resume = Callable[[Resumable[None], Works], None]  # ends an exchange, as `complete` does


class ExchangeOverlap:
    """The exchanges of a model, in the order in which backward starts them."""

    def __init__(self, device: torch.device) -> None:
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None
        self._ended: Any = None
        self._running: list[tuple[Resume, Resumable[None], Works]] = []
        self._backward: int | None = None
        self._ends: int | None = None  # the backward pass that calls `_end`

    def run(
        self, exchange: Resumable[None], resume: Resume, tensors: Sequence[Tensor], may_wait: bool
    ) -> None:
        """Start an exchange; end it now, or if it may wait during the rest of backward."""
        # ``tensors`` are those of other streams that it reads and writes.
        number = backward_number()
        may_wait = may_wait and number is not None
        if number != self._backward:
            # A backward pass that raised has left these exchanges; every rank has started them.
            self._finish_all()
            self._backward = number
        if may_wait and number != self._ends:
            after_backward(self._end)
            self._ends = number
        if self._streams is None:
            # End the exchange before: its last collectives would otherwise queue behind these.
            self._finish_all()
            self._running.append((resume, exchange, next(exchange)))
            if not may_wait:
                self._finish_all()
            return
        caller = self._streams.current_stream()
        if self._stream is None:
            self._stream = self._streams.Stream()
        if self._ended is not None:
            # FSDP2 frees a unit's buffers when its stream has passed this point, and backward
            # waits for that stream one unit later: so at most two exchanges hold memory.
            caller.wait_event(self._ended)
        self._stream.wait_stream(caller)
        with self._streams.stream(self._stream):
            complete(exchange)
            self._ended = self._stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        if not may_wait:
            caller.wait_event(self._ended)

    def _finish_all(self) -> None:
        while self._running:
            resume, exchange, works = self._running.pop(0)
            resume(exchange, works)

    def _end(self) -> None:
        """Make the results visible to what follows backward."""
        self._backward = self._ends = None
        self._finish_all()
        if self._ended is not None:
            self._streams.current_stream().wait_event(self._ended)
