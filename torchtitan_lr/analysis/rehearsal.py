# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What autograd keeps between forward and backward, counted by running a block that holds no data.

Which activations survive depends on the family, the plan, the checkpointing mode and on how each
operator is written. Instead of a formula for every combination, the block itself runs on fake
tensors (shapes without memory) as one rank of a process group that does not exist; what is still
alive afterwards is what a real run keeps. A block of any size takes a fraction of a second.

The CPU's operators are rehearsed. Its RMSNorm keeps the input and the normalized input in fp32,
which a fused kernel does not: on a GPU the true number is smaller, see `fused_norm_saving`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lr.loss import cross_entropy_sum
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.tensor_parallel import TPSettings, apply_tensor_parallel

Prepare = Callable[[nn.Module], None]
"""What is done to the model between tensor parallelism and the forward pass: checkpointing."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for backward on one rank, for one micro-batch.

    Args:
        block: One decoder block, its input included, its output not.
        ends: The embedding, the final norm, the head and the loss.
    """

    block: int
    ends: int


def saved_bytes(
    args: LlamaArgs,
    settings: TPSettings,
    tp_degree: int,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
    prepare: Prepare | None = None,
) -> SavedBytes:
    """Rehearse a forward pass and count what it leaves.

    Args:
        args: The model; one and two of its blocks are run.
        settings: A resolved plan; says nothing at degree 1.
        tp_degree: Tensor-parallel ranks T.
        batch: Sequences b of a micro-batch.
        seq_len: Tokens s of a sequence.
        dtype: The dtype that blocks compute in.
        prepare: Applied to the model after tensor parallelism.
    """
    with fake_ranks(tp_degree) as mesh:
        one, three = (
            _kept(replace(args, n_layers=layers), settings, mesh, batch, seq_len, dtype, prepare)
            for layers in (1, 3)
        )
    block = (three - one) // 2
    return SavedBytes(block, one - block)


def fused_norm_saving(args: LlamaArgs, tokens: int, dtype: torch.dtype) -> int:
    """Bytes a block keeps less where RMSNorm is one kernel, at T = 1 and without checkpointing.

    For each of the two norms the kernel keeps its input, d wide, and the statistic; the CPU keeps
    the input and its quotient by the rms, both in fp32 at least.
    """
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return 2 * tokens * args.dim * (2 * wide - dtype.itemsize)


@contextmanager
def fake_ranks(tp_degree: int) -> Iterator[DeviceMesh | None]:
    """Be rank 0 of `tp_degree` ranks that do not exist; None at degree 1.

    Raises:
        RuntimeError: If this process has a process group already.
    """
    if tp_degree == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=tp_degree, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (tp_degree,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def _kept(
    args: LlamaArgs,
    settings: TPSettings,
    mesh: DeviceMesh | None,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
    prepare: Prepare | None,
) -> int:
    with FakeTensorMode():
        model = _build(replace(args, max_seq_len=seq_len), dtype)
        if mesh is not None:
            apply_tensor_parallel(model, mesh, settings)
        if prepare is not None:
            prepare(model)
        tokens = torch.zeros(batch, seq_len, dtype=torch.long)
        outside = {_address(p) for p in model.parameters()} | {_address(model.freqs_cis)}
        living = LivingStorages()
        with living:
            logits = model(tokens)
            with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
                loss = cross_entropy_sum(logits, tokens)
            del logits
        kept = living.bytes(outside | {_address(tokens), _address(loss)})
        del loss
    return kept


def _build(args: LlamaArgs, dtype: torch.dtype) -> LlamaModel:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast afterwards would swap fake parameters
    try:
        return LlamaModel(args)
    finally:
        torch.set_default_dtype(default)


def _address(x: Tensor) -> int:
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.untyped_storage()._cdata


class LivingStorages(TorchDispatchMode):
    """Knows every storage that operators made, and which of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # An address is free for another storage once its own is gone.
                known = self._storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self, outside: set[int]) -> int:
        """Return the bytes of the living storages that are not among the addresses `outside`."""
        gc.collect()
        return sum(
            size
            for address, (reference, size) in self._storages.items()
            if not reference.expired() and address not in outside
        )
