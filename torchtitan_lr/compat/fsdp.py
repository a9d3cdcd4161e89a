# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""FSDP2 from inside: what a unit shards, and when it communicates.

Gradient compression needs the layout of a unit's buffer, and the ledger needs the owner of a
unit's communication; FSDP2 publishes neither. A run without ``[grad_compression]`` and without the
ledger calls nothing here but `replicate`.

Seen in torch 2.11 and 2.13. The fields of a parameter group have changed between the two.
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
# public, the class is not. If it moves, the import fails; if its two methods get other arguments,
# a compressed run fails in its first backward.
#
# replicate, ReplicateModule: replication on FSDP2's machinery. The public `replicate` of torch
# 2.11 and 2.13 is DDP's, which averages; ours must sum. If they move, the import fails.


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
    """Yield the sharded parameters of a unit with the entries that each rank gets of them.

    The order is that of the buffer which FSDP2 reduce-scatters, FSDP2's padding included. A codec
    must know it, because the buffer has no borders between tensors. If upstream changes the fields
    (``fsdp_params``, ``sharded_param``, ``padded_sharded_param_size``; seen in torch 2.11 and
    2.13), this raises an AttributeError. If upstream changes the order alone, the sizes of a unit
    no longer fit and `CompressedReduceScatter` refuses the first step.
    """
    for group in param_groups(module):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param, parameter.padded_sharded_param_size.numel()


def wrap_unit_calls(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace the calls in which a unit communicates: ``unshard`` and ``post_backward``.

    FSDP2 prefetches weights, so no module hook of the owner runs around its communication; the
    ledger replaces these two methods on the group itself. If upstream renames them (torch 2.11 and
    2.13 have both), this raises an AttributeError as soon as the ledger is attached.

    Args:
        module: An FSDP2 unit; any other module is left alone.
        wrap: Returns what is called instead of the method that it is given.

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
