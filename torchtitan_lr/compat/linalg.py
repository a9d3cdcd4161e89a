# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Decompositions without a wait, and operators on lists; tested with torch 2.11, 2.13, 2.15."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Takes a replacement back; the public ``Library`` can only be deleted.
from torch.library import _scoped_library


def norms_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return plain tensors' 2-norms, rounded to their dtype: one launch on a GPU for one dtype."""
    # Torch publishes no such function; `torch.nn.utils.get_total_norm` takes no dtype.
    return list(torch._foreach_norm(list(tensors), 2, dtype))


def between(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Return start + weight · (end − start) of each pair of plain tensors: one launch on a GPU."""
    # Torch publishes none on lists that is not in place.
    return list(torch._foreach_lerp(list(starts), list(ends), weight))


@contextmanager
def convergence_on_device(device: torch.device) -> Iterator[list[Tensor]]:
    """Let `torch.linalg.eigh` and `svd` keep on the device whether they converged.

    Inside of the context, in all threads, ``aten::_linalg_check_errors`` raises nothing; each call
    adds its int32 (b,) to the yielded list, 0 where the result is good.
    """
    # If upstream checks in another way, the host waits again and the list stays empty; a test fails
    # first.
    found: list[Tensor] = []

    def keep(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        found.append(info)

    with _scoped_library("aten", "IMPL") as library:
        key = torch._C._dispatch_key_for_device(device.type)
        library.impl("_linalg_check_errors", keep, key)
        yield found
