# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The matrix products that a rank issues between the start of a collective and its wait.

A device can run these products during the collective. A collective without any is exposed: the
device waits for it, unless products issued before its start are still running.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torchtitan_lr.compat.collectives import functional
from torchtitan_lr.compat.dispatch import storage_address


class Overlap:
    """Counts the FLOPs of products between start and wait of functional collectives.

    ``c10d`` collectives are not counted: FSDP2 waits for them with events of its streams.
    """

    def __init__(self) -> None:
        self.flops: Counter[Hashable] = Counter()
        self._issued = 0
        self._running: dict[int, tuple[Hashable, int]] = {}

    def start(self, key: Hashable, result: Any) -> None:
        """Record the start of a collective.

        Args:
            key: The counter's key.
            result: The result of the operator, a tensor to wait for.
        """
        if isinstance(result, Tensor):
            self._running[storage_address(result)] = (key, self._issued)

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Record an operator that is no collective: a product, a wait, or neither.

        Args:
            func: The operator's overload.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        packet = getattr(func, "overloadpacket", None)
        if packet is functional.wait_tensor:
            found = self._running.pop(storage_address(args[0]), None)
            if found is not None:
                key, before = found
                self.flops[key] += self._issued - before
        elif packet in flop_registry:
            self._issued += int(flop_registry[packet](*args, **kwargs, out_val=result))

    def clear(self) -> None:
        """Reset all counts."""
        self.flops.clear()
        self._running.clear()
