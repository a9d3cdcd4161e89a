# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Operators below autograd: dispatch modes, trees, schemas, storages, and the attention kernels.

The ledger, the recomputation of low-rank checkpointing and the rehearsal watch operators as they
are dispatched. `torch.utils._python_dispatch` and `torch.utils._pytree` are what torch documents
for that purpose in its own notes, but their modules are private.

Seen in torch 2.11 and 2.13. If a module moves, importing this one fails.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "ATTENTION_OPERATORS",
    "TorchDispatchMode",
    "TreeSpec",
    "changes_arguments",
    "lower_as_identity",
    "schema_of",
    "storage_address",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The fused attention kernels: they return what their backward needs, output and log-sum-exp.

The unfused one (``SDPBackend.MATH``) needs the s × s probabilities; it is always repeated. Torch
has no public list of them, and torchtitan's own lacks the CPU's. If a kernel is renamed, the import
fails. A new kernel would not be kept, and attention would silently run twice; a test compares this
list with all operators of torch.
"""


def schema_of(func: Any) -> tuple[str, list[str]]:
    """Return an operator's name without its namespace, and the names of its parameters.

    Reads ``OpOverload._schema``. If upstream renames it, the ledger fails with an AttributeError.
    """
    schema = func._schema
    return str(schema.name.partition("::")[2]), [argument.name for argument in schema.arguments]


def changes_arguments(func: Any) -> bool:
    """Return whether an operator writes to an argument; False for what has no schema.

    Reads ``OpOverload._schema.is_mutable``. If upstream renames it, low-rank checkpointing no
    longer notices that an operator changes a kept tensor: the door's test fails first.
    """
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


def storage_address(x: Tensor | torch.UntypedStorage) -> int:
    """Return what identifies a storage as long as it lives; fake ones have no data pointer.

    Reads ``UntypedStorage._cdata``. If upstream removes it, recomputation and rehearsal fail with
    an AttributeError. An address is free for another storage once its own is gone.
    """
    storage = x.untyped_storage() if isinstance(x, Tensor) else x
    return int(storage._cdata)


def lower_as_identity(operator: Any) -> None:
    """Let Inductor compile an operator of one tensor into nothing.

    Inductor has no public registry for that. Uses ``torch._inductor.lowering``; the import takes
    seconds, so it comes when it is needed. If upstream changes the registry, compiling a block with
    low-rank checkpointing fails, or calls the operator, which copies its argument.

    Args:
        operator: An overload; one that is registered already stays as it is.
    """
    from torch._inductor.lowering import lowerings, register_lowering

    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(lambda x: x)
