# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Naming the messages between pipeline stages.

A send or receive happens outside the model, where no forward hook and no autograd node says whose
it is. So the stage that prepares a message leaves a mark on its tensor, and the ledger reads it.
"""

from typing import Any

from torch import Tensor

from torchtitan_lr.compat.dispatch import tree_leaves

_MARK = "_pipeline_boundary"


def mark(operations: list[Any], boundary: int, pass_: str) -> list[Any]:
    """Mark the tensors of point-to-point operations; return the operations.

    Args:
        operations: ``torch.distributed.P2POp``.
        boundary: Boundary i lies between the stages i and i + 1.
        pass_: ``forward`` or ``backward``.
    """
    for operation in operations:
        setattr(operation.tensor, _MARK, (f"boundary {boundary}", pass_))
    return operations


def boundary_of(arguments: Any) -> tuple[str, str] | None:
    """Return scope and pass of a message among an operator's arguments, None without a mark."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor) and hasattr(leaf, _MARK):
            found: tuple[str, str] = getattr(leaf, _MARK)
            return found
    return None
