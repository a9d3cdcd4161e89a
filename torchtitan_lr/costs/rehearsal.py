# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tensors that autograd keeps between forward and backward, counted on blocks without data.

The blocks themselves run on fake tensors as one rank of a process group that does not exist. What
is alive after forward is what a real run keeps; backward tells how much memory it takes on top, and
which collectives checkpointing repeats. The CPU's RMSNorm keeps more than a GPU's, which
`rank_memory.rehearse_run` subtracts.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.compat.dispatch import storage_address, tree_leaves
from torchtitan_lr.compat.fake import FakeTensorMode, RehearsalMode, fake_process_group
from torchtitan_lr.compat.pipelining import backward_in_halves
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import PLACES, LlamaModel
from torchtitan_lr.parallel.context import GatheredAttention, apply_context_parallel
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel

Prepare = Callable[[nn.Module], None]
"""What is done to the model between tensor parallelism and the forward pass: checkpointing."""

Repeats = dict[tuple[str, str, str, str], tuple[int, int]]
"""Collectives that run again: calls and elements by part of the model, mesh dimension, operation
and dtype."""


@dataclass(frozen=True)
class Workload:
    """The computation of one rank for one micro-batch."""

    args: LlamaArgs
    settings: TPSettings  # a resolved plan; ignored when T is 1
    tp_degree: int  # tensor-parallel ranks T
    batch: int  # sequences b of a micro-batch
    seq_len: int  # tokens s of a sequence
    dtype: torch.dtype  # the dtype that blocks compute in
    cp_degree: int = 1  # context-parallel ranks C, which share the tokens
    gather: str = "kv"  # what they gather, ``kv`` or ``latents``
    # Whether a pipeline computes gradients of inputs first, and those of weights later
    splits_backward: bool = False

    def inputs(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token ids on a rank, and what else its model is called with."""
        tokens = torch.zeros(self.batch, self.seq_len // self.cp_degree, dtype=torch.long)
        arguments = {"targets": tokens}
        if self.cp_degree > 1:
            arguments[PLACES] = torch.zeros_like(tokens)
        return tokens, arguments


@dataclass(frozen=True)
class Rehearsal:
    """The memory of one rank for one micro-batch."""

    # Bytes kept by a block, its input included, its output not; a mean over ``selective`` turns
    block: float
    ends: int  # bytes kept by the embedding, the final norm, the head and the loss
    working: int  # bytes that backward needs beyond what forward left, whole gradients aside
    # Collectives that run again in a period of checkpointing: calls and elements
    repeated: "PerPeriod" = field(default_factory=dict)
    # Likewise of a backward in two halves, which the first stage of a pipeline does not have
    repeated_in_halves: "PerPeriod" = field(default_factory=dict)


# By mesh dimension, operation and dtype
PerPeriod = dict[tuple[str, str, str], tuple[int, int]]


def rehearse(workload: Workload, prepare: Prepare | None = None, period: int = 1) -> Rehearsal:
    """Run a short model forward and backward on tensors without data.

    It has one and three blocks, or periods of ``selective_ac_option``, of which the mean counts.
    """
    short = [replace(workload.args, n_layers=n * period) for n in (1, 3)]
    halves: PerPeriod = {}
    with fake_ranks(workload.tp_degree, workload.cp_degree) as mesh:
        whole = [replace(workload, args=args, splits_backward=False) for args in short]
        one, three = (run_once(shorter, mesh, prepare) for shorter in whole)
        repeated = _per_period(one.repeated, three.repeated)
        if workload.splits_backward and mesh is not None:
            split = [replace(shorter, splits_backward=True) for shorter in whole]
            halves = _per_period(*(run_once(again, mesh, prepare).repeated for again in split))
    for what in [what for what in repeated if what[0] == "cp"]:
        # What attention gathers again in any backward is no repetition.
        calls, elements = repeated.pop(what)
        if what in halves:
            halves[what] = halves[what][0] - calls, halves[what][1] - elements
    block = (three.kept - one.kept) / (2 * period)
    ends = one.kept - round(period * block)
    return Rehearsal(block, ends, three.peak - three.kept, repeated, halves)


def _per_period(one: Repeats, three: Repeats) -> PerPeriod:
    """Return what a period of blocks repeats, from runs of one and of three periods."""
    less, found = _over_parts(one), {}
    for key, (calls, elements) in _over_parts(three).items():
        first = less.get(key, (0, 0))
        found[key] = ((calls - first[0]) // 2, (elements - first[1]) // 2)
    return found


@contextmanager
def fake_ranks(tp_degree: int, cp_degree: int = 1) -> Iterator[DeviceMesh | None]:
    """Be rank 0 of absent ranks; yield their mesh of ``tp`` or ``cp, tp``, None for one rank."""
    if tp_degree * cp_degree == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("a rehearsal needs a process without a process group")
    sizes = {"cp": cp_degree, "tp": tp_degree} if cp_degree > 1 else {"tp": tp_degree}
    with fake_process_group(tp_degree * cp_degree):
        yield init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


def _attend_without_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # A GPU has no mask of a rank's own tokens to those of the row, which a CPU adds.
    out: Tensor = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out


@dataclass
class Count:
    """Bytes after forward, bytes at the peak of backward, and repeated collectives of a run."""

    kept: int
    peak: int
    repeated: Repeats


def build_prepared(
    workload: Workload, mesh: DeviceMesh | None, prepare: Prepare | None
) -> LlamaModel:
    """Build a workload's model, split it over the mesh and wrap it; call it under fake tensors."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(workload.dtype)  # a cast afterwards would swap fake parameters
    try:
        model = LlamaModel(replace(workload.args, max_seq_len=workload.seq_len))
    finally:
        torch.set_default_dtype(default)
    if mesh is not None:
        apply_tensor_parallel(model, mesh["tp"], workload.settings)
    if mesh is not None and workload.cp_degree > 1:
        apply_context_parallel(model, Ranks.of(mesh["cp"]), workload.gather)
        for module in model.modules():
            if isinstance(module, GatheredAttention):
                module.to_prefix = _attend_without_mask
    if prepare is not None:
        prepare(model)
    return model


def run_once(workload: Workload, mesh: DeviceMesh | None, prepare: Prepare | None) -> Count:
    """Run a model forward and backward on tensors without data."""
    with FakeTensorMode():
        model = build_prepared(workload, mesh, prepare)
        for parameter in model.parameters():
            # Whole gradients are counted elsewhere, by unit.
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tokens, arguments = workload.inputs()
        outside = {_address(p) for p in (*model.parameters(), *arguments.values())}
        outside |= {_address(model.freqs_cis), _address(tokens)}
        living = LivingStorages(outside)
        groups = {}
        if mesh is not None:
            groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        with CommLedger([model], groups) as ledger, living:
            x = tokens
            if workload.splits_backward:
                embed = model.get_submodule("tok_embeddings")
                x = embed(tokens).detach().requires_grad_()
                model.tok_embeddings = None  # as in a later stage
            loss = model(x, **arguments)
            kept = living.bytes() - _storage(loss).nbytes()
            if workload.splits_backward:
                backward_in_halves(loss, x, list(model.parameters()))
            else:
                loss.backward()
    repeated: Repeats = {}
    for row in ledger.rows(split_recompute=True):
        # Attention under context parallelism gathers again without checkpointing too.
        gathers = row["mesh_dim"] == "cp" and row["op"] == "all_gather"
        if row["recompute"] or (gathers and row["pass"] == "backward"):
            what = (row["scope"], row["mesh_dim"], row["op"], row["dtype"])
            calls, elements = repeated.get(what, (0, 0))
            repeated[what] = calls + row["calls"], elements + row["elements"]
    return Count(kept, living.peak, repeated)


def _over_parts(repeats: Repeats) -> PerPeriod:
    """Add up the parts of the model."""
    found: PerPeriod = {}
    for (_, *what), (calls, elements) in repeats.items():
        dim, op, dtype = what
        before = found.get((dim, op, dtype), (0, 0))
        found[dim, op, dtype] = before[0] + calls, before[1] + elements
    return found


def _storage(x: Tensor) -> torch.UntypedStorage:
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.untyped_storage()


def _address(x: Tensor) -> int:
    return storage_address(_storage(x))


class LivingStorages(RehearsalMode):
    """Tracks the storages that operators allocate, and which of them are alive."""

    def __init__(self, outside: set[int]) -> None:
        super().__init__()
        self.peak = 0
        self._outside = outside
        self._at_most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # An address can be reused after its storage is freed.
                address = storage_address(storage)
                known = self._storages.get(address)
                if known is None or known[0].expired():
                    self._storages[address] = (StorageWeakRef(storage), storage.nbytes())
                    self._at_most += storage.nbytes()
        if self._at_most > self.peak:  # otherwise a sweep cannot change the peak
            self._at_most = self._sweep()
            self.peak = max(self.peak, self._at_most)

    def bytes(self) -> int:
        """Return the bytes of the live storages."""
        gc.collect()
        return self._sweep()

    def _sweep(self) -> int:
        gone = [a for a, (reference, _) in self._storages.items() if reference.expired()]
        for address in gone:
            del self._storages[address]
        return sum(n for a, (_, n) in self._storages.items() if a not in self._outside)
