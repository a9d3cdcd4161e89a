# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of FSDP2: a unit's sharded parameters and its communication calls.

FSDP2 publishes neither the layout of a unit's buffer, for gradient compression, nor the unit that
communicates, for the ledger, and frees a rank's own gradients, which explain a rejected step, when
they are summed. It copies what no rank shards. Tested with torch 2.11, 2.13 and 2.15, between which
parameter groups changed; `spare_copies` with torch 2.13.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor, nn

# Replication built on FSDP2. The public `replicate` of torch 2.11 to 2.15 is DDP's, which averages
# gradients; ours must sum.
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule as ReplicateModule
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.fsdp import FSDPModule

# What `FSDPModule.set_custom_reduce_scatter` takes; the method is public, the classes are not. If
# the arguments of their methods change, a compressed run fails in its first backward. A subclass of
# their ``DefaultReduceScatter`` is replaced without a word by FSDP2's settings of memory.
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllocMixin as DefaultAllocMixin,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torchtitan_lr.compat.dispatch import norms_of
from torchtitan_lr.compat.dtensor import local_part


def param_groups(module: object) -> list[Any]:
    """Return FSDP2's own lists of a unit's parameters; none for any other module."""
    # Torch 2.11 has one per unit (``_fsdp_param_group``), torch 2.13 several.
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def ranks_of(module: FSDPModule) -> int:
    """Return the number of ranks over which a unit's gradients are summed; 1 without parameters."""
    # If upstream renames ``mesh_info``, this raises before the first step.
    return max((group.mesh_info.mesh.size() for group in param_groups(module)), default=1)


Norms = list[tuple[tuple[Tensor, ...], Tensor]]
"""Sharded parameters and the norms (n,) of their gradients."""


class OwnParamGroup(FSDPParamGroup):
    """A unit's parameters, which note this rank's gradients' norms, and are sent in another dtype.

    `parallel.data_parallel.round_on_the_wire` says which dtype is used where.
    """

    norms: Norms | None = None  # gets an entry at every reduction
    wire_dtype: torch.dtype | None = None  # None for that in which FSDP2 adds up micro-batches

    def post_backward(self, *arguments: Any) -> None:
        """Note the norms, and go on as FSDP2 does."""
        if self.norms is not None and self.reduce_grads:
            own: list[tuple[Tensor, Tensor]] = []
            for parameter in self.fsdp_params:
                if not hasattr(parameter, "_unsharded_param"):
                    continue
                # A gradient may be in two terms: of earlier backward passes, and of the last one.
                terms = (parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad)
                own += [(parameter.sharded_param, local_part(g)) for g in terms if g is not None]
            if own:
                parameters, gradients = zip(*own, strict=True)
                self.norms.append((parameters, torch.stack(norms_of(gradients))))
        if self.wire_dtype is not None:
            # FSDP2's policy has one dtype for the wire and for the sum of micro-batches. The
            # parameters read the policy's; only a reduction reads the group's.
            self._reduce_dtype = self.wire_dtype
        super().post_backward(*arguments)
        if self.wire_dtype is not None and self._partial_reduce_output is not None:
            # HSDP's sum over the shards. Torch adds the sums of later micro-batches to it, in fp32;
            # it adds it to that of the last one, in the wire's dtype, which rounds the total once.
            with self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
                self._partial_reduce_output = self._partial_reduce_output.float()


def _own_param_groups(module: FSDPModule) -> list[OwnParamGroup]:
    """Return a unit's parameter groups as ours: `fully_shard` has no argument for their class."""
    groups = param_groups(module)
    for group in groups:
        group.__class__ = OwnParamGroup
    return groups


def watch_gradients(module: FSDPModule, norms: Norms | None) -> None:
    """Let a unit add the norms of this rank's own gradients to a list, or no longer (None)."""
    # If upstream reduces elsewhere than in ``post_backward``, the list stays empty, and a rank that
    # made a NaN is not named.
    for group in _own_param_groups(module):
        group.norms = norms


def send_in(module: FSDPModule, wire_dtype: torch.dtype) -> None:
    """Let a unit send its gradients in a dtype, and add up micro-batches in its policy's."""
    # If upstream reads another field than ``_reduce_dtype``, gradients travel in the policy's
    # dtype, and the dtypes of a test's ledger differ.
    for group in _own_param_groups(module):
        group.wire_dtype = wire_dtype


class _WholeParam(FSDPParam):
    """A parameter that no rank shards: it is cast to where FSDP2 would copy the cast one."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """Return the memory of the whole parameter, filled: a copy to itself does nothing."""
        if self.param_dtype is None or self.offload_to_cpu:
            return super().all_gather_inputs
        own = self._sharded_param_data
        self.init_all_gather_outputs([own.numel()], [self.param_dtype], 1, self.device)
        self.alloc_all_gather_outputs()
        (whole,) = self.all_gather_outputs
        with torch.autograd._unsafe_preserve_version_counter(whole):
            whole.copy_(own)
        return [whole]


class _InPlace(DefaultReduceScatter):
    """Gives FSDP2 the memory of gradients for their sums over the one shard too."""

    _gradients: Callable[[], Tensor | None] = staticmethod(lambda: None)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory, at every second call that of the first."""
        memory, self._gradients = self._gradients(), lambda: None
        if memory is None or memory.shape != torch.Size(size):
            memory = super().allocate(size, dtype=dtype, device=device)
            self._gradients = ref(memory)
        return memory


def spare_copies(module: FSDPModule) -> None:
    """Let a replicated unit cast parameters and gradients without a copy.

    Several replicas still divide gradients by 1.0 (`sum_gradients`), into new memory.
    """
    # If upstream copies elsewhere, the numbers are the same and a test counts more bytes. Before
    # torch 2.13 a whole parameter may be gathered like others, by other streams than its reader's.
    # Not for FSDP2's unit of one shard: it may free gradients before their last read.
    if torch.__version__ < "2.13" or not isinstance(module, ReplicateModule):
        return
    for group in param_groups(module):
        group._reduce_scatter_comm = _InPlace()
        for parameter in group.fsdp_params:
            parameter.__class__ = _WholeParam


def unit_parameters(module: FSDPModule) -> Iterator[tuple[Tensor, int]]:
    """Yield a unit's sharded parameters and their entries per rank, as in FSDP2's buffer."""
    # A codec needs them, because the buffer does not mark where a tensor begins. If upstream
    # changes the order, the sizes of a unit no longer match and `Compressor` raises in the first
    # step.
    for group in param_groups(module):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param, parameter.padded_sharded_param_size.numel()


def reads_sums_at_once(module: FSDPModule, sums: Tensor) -> bool:
    """Return whether FSDP2 reads a unit's sums as soon as its communicator returns.

    It casts them, adds them, copies them to the host, or runs hooks; else it only makes views.
    """
    for group in param_groups(module):
        for parameter in group.fsdp_params:
            own = parameter.sharded_param
            hooks = getattr(own, "_post_accumulate_grad_hooks", None)
            cast = parameter.orig_dtype != sums.dtype
            if cast or parameter.offload_to_cpu or own.grad is not None or hooks:
                return True
    return False


def wrap_unit_calls(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Wrap the methods in which a unit communicates; return what undoes that."""
    replaced = ExitStack()
    for group in param_groups(module):
        # FSDP2 prefetches weights, so the unit's module hooks do not enclose its communication.
        for method in ("unshard", "post_backward"):
            # A ledger inside another ledger wraps the outer one's functions.
            replaced.enter_context(patch.object(group, method, wrap(getattr(group, method))))
    return replaced.close
