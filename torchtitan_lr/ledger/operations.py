# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Identification of collectives among dispatched operators, and their sizes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_lr.compat.collectives import (
    GROUP_ARGUMENTS,
    NAMESPACES,
    NO_PAYLOAD,
    OPERATIONS,
    group_name_of,
)
from torchtitan_lr.compat.dispatch import schema_of, tree_leaves


class Collective(NamedTuple):
    """One call of a collective.

    Attributes:
        op: The operation's common name.
        group: Name of the process group.
        dtype: Dtype of the payload.
        elements: Elements of the logical tensor, the larger of the call's input and output.
        results: What a ``c10d`` operator writes while it runs; empty for what it only sends.
    """

    op: str
    group: str
    dtype: torch.dtype
    elements: int
    results: tuple[Tensor, ...] = ()


def identify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective | None:
    """Identify the collective of a dispatched operator.

    Returns:
        The call, or None if the operator moves no data between ranks.

    Raises:
        NotImplementedError: An unknown operator on a process group; ignoring it would make the
            totals wrong.
    """
    if getattr(func, "namespace", None) not in NAMESPACES:
        return None
    name, parameters = schema_of(func)
    if name in NO_PAYLOAD or GROUP_ARGUMENTS.isdisjoint(parameters):
        return None
    if name not in OPERATIONS:
        raise NotImplementedError(f"the ledger does not know the collective {func}")
    op = OPERATIONS[name]
    named = dict(zip(parameters, args, strict=False)) | kwargs
    leaves = {key: tree_leaves(value) for key, value in named.items()}
    tensors = {key: [x for x in found if isinstance(x, Tensor)] for key, found in leaves.items()}
    payload = next(found for found in tensors.values() if found)
    group = named.get("group_name", named.get("process_group"))
    elements = max(sum(t.numel() for t in found) for found in tensors.values())
    if op == "all_gather" and not any(key.startswith("out") for key in tensors):
        # A functional all-gather has only its input as an argument.
        elements *= named["group_size"]
    written = [found for key, found in tensors.items() if key.startswith("out")]
    if not written and op not in ("send", "send_recv"):
        written = [payload]  # in place
    results = tuple(tensor for found in written for tensor in found)
    return Collective(op, group_name_of(group), payload[0].dtype, int(elements), results)
