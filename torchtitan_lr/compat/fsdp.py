# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of FSDP2: a unit's sharded parameters and its communication calls.

Gradient compression needs the layout of a unit's buffer, and the ledger needs the unit that
communicates; FSDP2 publishes neither. A run without ``[grad_compression]`` and without the ledger
uses only `replicate` from this module.

Tested with torch 2.11 and 2.13. The fields of a parameter group changed between the two.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = [
    "ReduceScatter",
    "ReplicateModule",
    "param_groups",
    "replicate",
    "unit_parameters",
    "wrap_unit_calls",
]
# ReduceScatter: the interface that `FSDPModule.set_custom_reduce_scatter` takes; the method is
# public, the class is not. If it moves, the import fails; if the arguments of its two methods
# change, a compressed run fails in its first backward.
#
# replicate, ReplicateModule: replication built on FSDP2. The public `replicate` of torch 2.11 and
# 2.13 is DDP's, which averages gradients; ours must sum. If they move, the import fails.


def param_groups(module: object) -> list[Any]:
    """Return the parameter groups of an FSDP2 unit; none for any other module.

    Torch 2.11 has one group per unit (``_fsdp_param_group``), torch 2.13 a list of them
    (``_fsdp_param_groups``). If upstream renames both, this raises an AttributeError.
    """
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def unit_parameters(module: FSDPModule) -> Iterator[tuple[Tensor, int]]:
    """Yield the sharded parameters of a unit with the number of entries per rank.

    The order and the padding are those of the buffer that FSDP2 reduce-scatters. A codec needs
    them, because the buffer does not mark where a tensor begins. If upstream changes the fields
    (``fsdp_params``, ``sharded_param``, ``padded_sharded_param_size``; seen in torch 2.11 and
    2.13), this raises an AttributeError. If upstream changes only the order, the sizes of a unit no
    longer match and `CompressedReduceScatter` raises in the first step.
    """
    for group in param_groups(module):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param, parameter.padded_sharded_param_size.numel()


def wrap_unit_calls(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Wrap the methods in which a unit communicates: ``unshard`` and ``post_backward``.

    FSDP2 prefetches weights, so the unit's module hooks do not enclose its communication; the
    ledger replaces these two methods on the parameter group itself. If upstream renames them (torch
    2.11 and 2.13 have both), this raises an AttributeError as soon as the ledger is attached.

    Args:
        module: An FSDP2 unit; any other module is left unchanged.
        wrap: Takes a method and returns its replacement.

    Returns:
        A function that undoes the replacement.
    """
    replaced = []
    for group in param_groups(module):
        for method in ("unshard", "post_backward"):
            setattr(group, method, wrap(getattr(group, method)))
            replaced.append((group, method))

    def undo() -> None:
        for group, method in replaced:
            delattr(group, method)

    return undo
