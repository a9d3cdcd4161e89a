# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Operators below autograd: modes, schemas, storages, kernels, on lists, and in the compiler.

Torch's notes recommend the modules of modes and trees, although they are private. Tested with torch
2.11, 2.13 and 2.15.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._higher_order_ops import flex_attention, inductor_compiled_code

# Takes a replacement back; the public ``Library`` can only be deleted.
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The fused attention kernels, which return the output and log-sum-exp that backward needs.

The unfused one (``SDPBackend.MATH``) needs the s × s probabilities and is always recomputed. Torch
has no public list of the kernels, and torchtitan's list omits the CPU kernel. If a kernel is
renamed, the import fails. The output of a new kernel would not be kept, and attention would
silently run twice; a test compares this list with all operators of torch.
"""

fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""A CPU's kernel; keys and values may have fewer heads than queries."""

FLEX_ATTENTION = flex_attention
"""The operator of ``flex_attention``, in the graph of a compiled block."""

FLEX_ATTENTION_CALL = inductor_compiled_code
"""What dispatch modes see of it outside of compiled blocks: a call of torchtitan's compiled
function, the only one of a block that torch wraps so. If upstream renames it, the import fails."""


def schema_of(func: Any) -> tuple[str, list[str]]:
    """Return an operator's name without its namespace, and the names of its parameters."""
    schema = func._schema
    return str(schema.name.partition("::")[2]), [argument.name for argument in schema.arguments]


def changes_arguments(func: Any) -> bool:
    """Return whether an operator writes to an argument; False for a callable without a schema."""
    # If upstream renames these, the ledger and the estimate take operators that write for views;
    # this function's test fails first.
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


def results_are_cached() -> bool:
    """Return whether selective checkpointing keeps results, which nothing may overwrite."""
    # If upstream renames these, the import fails.
    caching = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    return any(isinstance(mode, caching) for mode in _get_current_dispatch_mode_stack())


def storage_address(x: Tensor | torch.UntypedStorage) -> int:
    """Return an id of a storage that is unique while it exists, and may be reused after it."""
    # Fake tensors have storages, but no data pointers.
    storage = x.untyped_storage() if isinstance(x, Tensor) else x
    return int(storage._cdata)


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


def remake_inputs_of_products(enabled: bool = True) -> None:
    """Let backward passes compiled from now on make element-wise inputs of products again."""
    # By default the partitioner of forward and backward keeps whatever a product of backward reads:
    # σ(h) beside h, SwiGLU's product beside its factors, the normalized stream beside the stream.
    # If the setting is gone, the results are the same and compiled blocks keep more for backward.
    if hasattr(functorch_config, "ban_recompute_materialized_backward"):
        functorch_config.ban_recompute_materialized_backward = not enabled


def lower_as_identity(operator: Any) -> None:
    """Make Inductor compile an operator of one tensor to the identity."""
    # Inductor has no public registry for this. If upstream changes the private one, compiling with
    # low-rank checkpointing fails, or calls the operator, which copies its argument. Late: the
    # import takes seconds.
    from torch._inductor.lowering import lowerings, register_lowering

    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(lambda x: x)
