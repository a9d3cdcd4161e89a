# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Count the live memory that operators allocated, real or fake."""

import gc
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_lr.compat.dispatch import storage_address, tree_leaves
from torchtitan_lr.compat.fake import RehearsalMode


class LivingStorages(RehearsalMode):
    """Tracks the storages that operators allocate, and which of them are alive.

    Args:
        outside: Addresses of storages to ignore: parameters, buffers, inputs.

    Attributes:
        peak: Maximum of the live bytes after any operator.
    """

    def __init__(self, outside: set[int]) -> None:
        super().__init__()
        self.peak = 0
        self._outside = outside
        self._froze = False
        self._at_most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not self.finding_shapes:
                storage = leaf.untyped_storage()
                # An address can be reused after its storage is freed.
                address = storage_address(storage)
                known = self._storages.get(address)
                if known is None or known[0].expired():
                    self._storages[address] = (StorageWeakRef(storage), storage.nbytes())
                    self._at_most += storage.nbytes()
        if self._at_most > self.peak:  # otherwise a sweep cannot change the peak
            self._at_most = self._sweep()
            self.peak = max(self.peak, self._at_most)
        return out

    def __enter__(self) -> "LivingStorages":
        # A collection over all objects of torch's modules would take longer than a rehearsal.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._froze:
            gc.unfreeze()

    def bytes(self) -> int:
        """Return the bytes of the live storages."""
        gc.collect()
        return self._sweep()

    def _sweep(self) -> int:
        gone = [a for a, (reference, _) in self._storages.items() if reference.expired()]
        for address in gone:
            del self._storages[address]
        return sum(n for a, (_, n) in self._storages.items() if a not in self._outside)
