# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The entries of a recording: which operators ran, and where their results lay."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dispatch import TreeSpec, storage_address

_state = threading.local()

OUTSIDE = object()
"""Stands for a view of an argument, a parameter or a buffer: of something that stays."""


@dataclass(frozen=True)
class Output:
    """Where one tensor that an operator returned lies."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    argument: int | None
    """Which argument it is, for an operator that works in place."""


@dataclass
class Call:
    """One operator of the forward pass."""

    func: Any
    reads: tuple[int, ...]
    outputs: list[Any]
    """An `Output` for a tensor, `OUTSIDE` for a view of an argument, a parameter or a buffer,
    anything else as it was."""
    spec: TreeSpec

    def storages(self) -> list[int]:
        """Return the storages of its results."""
        return [out.storage for out in places(self.outputs)]


@dataclass(frozen=True)
class Saved:
    """Stands in the autograd graph for a tensor that is to be recomputed."""

    index: int
    place: Output


def place_of(x: Tensor, storage: int, argument: int | None) -> Output:
    """Describe a tensor, given its storage's number and which argument it is, if any."""
    offset = int(x.storage_offset())
    return Output(storage, x.size(), x.stride(), offset, x.dtype, x.device, argument)


def places(outputs: list[Any]) -> list[Output]:
    """Return the tensors among a call's outputs."""
    return [out for out in outputs if isinstance(out, Output)]


def alias(kept: Tensor, place: Output) -> Tensor:
    """Return the tensor that lay at a place of the storage of ``kept``."""
    empty = torch.empty(0, dtype=place.dtype, device=place.device)
    return empty.set_(kept.untyped_storage(), place.offset, place.size, place.stride)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether one is a view of the other, or both of a third."""
    return storage_address(a) == storage_address(b)


def is_recomputing() -> bool:
    """Return whether this thread is inside a recomputation."""
    return getattr(_state, "depth", 0) > 0


@contextmanager
def recomputing() -> Iterator[None]:
    """Make `is_recomputing` true in this thread."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
