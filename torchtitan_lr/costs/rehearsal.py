# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A micro-batch of one rank, run on tensors without data: memory, kernels, repeated messages.

The blocks themselves run on the device ``meta``, as one rank of a process group that does not
exist. What is alive after forward is what a real run keeps; backward tells how much memory it takes
on top, and which collectives checkpointing repeats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.compat.dispatch import fused_attention, storage_address
from torchtitan_lr.compat.fake import fake_process_group, functions_by
from torchtitan_lr.compat.pipelining import backward_in_halves
from torchtitan_lr.costs.kernels import Recorder, Work
from torchtitan_lr.costs.messages import Traffic, merge
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import summed_loss
from torchtitan_lr.models.llama import PLACES, LlamaModel
from torchtitan_lr.parallel import checkpoint_modes
from torchtitan_lr.parallel.context import GatheredAttention, apply_context_parallel
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, set_default_dtype

if TYPE_CHECKING:
    from torchtitan_lr.costs.described_run import Run

Prepare = Callable[[nn.Module], None]
"""What is done to the model between tensor parallelism and the forward pass: checkpointing."""

Passes = list[Work]  # of forward, and of backward with what checkpointing repeats


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
    on_gpu: bool = False  # whether RMSNorm is one kernel, as on a GPU, which keeps less
    compiles: bool = False  # whether a compiler fuses the element-wise kernels of a block


@dataclass(frozen=True)
class Rehearsal:
    """One rank for one micro-batch."""

    # Bytes kept by a block, its input included, its output not; a mean over ``selective`` turns
    block: float
    ends: int  # bytes kept by the embedding, the final norm, the head and the loss
    working: int  # bytes that backward needs beyond what forward left, whole gradients aside
    block_work: Passes  # likewise a mean
    ends_work: Passes
    period: int  # blocks after which the pattern of checkpointing repeats
    sent_again: list[Traffic]  # what checkpointing repeats, of the blocks of two periods
    # Likewise of a backward in two halves, which the first stage of a pipeline does not have
    sent_again_in_halves: list[Traffic]

    def repeated(self, block: int, in_halves: bool = False) -> list[Traffic]:
        """Return what a block of the whole model sends again for a micro-batch."""
        # LaX's first block has no latents to add; a later stage gets some.
        first = block < self.period and not in_halves
        rehearsed = block if first else self.period + block % self.period
        rows = self.sent_again_in_halves if in_halves else self.sent_again
        again = [row for row in rows if row.scope == f"block {rehearsed}"]
        return [replace(row, scope=f"block {block}") for row in again]


_KNOWN: dict[str, Rehearsal] = {}


def rehearse_run(run: Run, mode: str | None = None, on_gpu: bool = True) -> Rehearsal:
    """Rehearse a run's blocks; the compiler's own mode is a straight line between two others."""
    section = run.config.activation_checkpoint
    mode = run.checkpointing if mode is None else mode
    if mode not in checkpoint_modes.EAGER_MODES:
        least, most = (rehearse_run(run, each, on_gpu) for each in ("full", "none"))
        return _between(least, most, section.memory_budget)
    workload = Workload(
        run.args,
        run.settings if run.tp > 1 else TPSettings(),
        run.tp,
        run.microbatch,
        run.seq_len,
        TORCH_DTYPE_MAP[run.config.training.mixed_precision_param],
        run.cp,
        run.gather,
        run.splits_backward,
        on_gpu,
        checkpoint_modes.compiles_model(run.config),
    )
    # Tensors without data have no generator whose state could be kept; it is a few kilobytes.
    section = replace(section, mode=mode, preserve_rng_state=False)
    # Blocks run here uncompiled, where plans of several ranks keep inputs of products anyway.
    section.keep_inputs = "on" if run.keeps_inputs and run.tp == 1 else "off"
    # Alternatives, and runs that differ in their ranks only, often have the same blocks.
    key = repr((workload, section))
    if key not in _KNOWN:
        compiler = replace(run.config.compile, enable=False)
        config = replace(run.config, activation_checkpoint=section, compile=compiler)
        prepare = partial(checkpoint_modes.apply_activation_checkpoint, job_config=config)
        _KNOWN[key] = rehearse(workload, prepare, checkpoint_modes.wrapping_period(section, mode))
    return _KNOWN[key]


def _between(least: Rehearsal, most: Rehearsal, share: float) -> Rehearsal:
    def mean(a: Passes, b: Passes) -> Passes:
        return [x.plus(x, -share).plus(y, share) for x, y in zip(a, b, strict=True)]

    return replace(
        least,
        block=least.block + share * (most.block - least.block),
        working=max(least.working, most.working),
        block_work=mean(least.block_work, most.block_work),
        ends_work=mean(least.ends_work, most.ends_work),
    )


def rehearse(workload: Workload, prepare: Prepare | None = None, period: int = 1) -> Rehearsal:
    """Run a short model forward and backward on tensors without data.

    It has one and two blocks, or periods of ``selective_ac_option``: the second counts.
    """
    shorter, longer = (
        replace(workload, args=replace(workload.args, n_layers=n * period)) for n in (1, 2)
    )
    with fake_ranks(workload.tp_degree, workload.cp_degree) as mesh:
        one, two = (_run(each, mesh, prepare) for each in (shorter, longer))
        halves = []
        if workload.splits_backward and mesh is not None:
            halves = _run(longer, mesh, prepare, in_halves=True).sent
    # What attention under context parallelism gathers in any backward is no repetition.
    usual = [row for row in two.sent if row.mesh_dim == "cp"]
    again = [row for row in two.sent if row.mesh_dim != "cp"]
    halves += [replace(row, calls=-row.calls, elements=-row.elements) for row in usual if halves]
    block_work, ends_work = [], []
    for backward in (False, True):
        less, more = (run.recorder.work(backward, workload.compiles) for run in (one, two))
        block_work.append(Work().plus(more.plus(less, -1), 1 / period))
        # The trainer compiles block by block, and the loss: with it count embedding and norm.
        ends_work.append(less.plus(less.plus(more, -1)))
    return Rehearsal(
        block=(two.kept - one.kept) / period,
        ends=2 * one.kept - two.kept,
        working=two.recorder.peak - two.kept,
        block_work=block_work,
        ends_work=ends_work,
        period=period,
        sent_again=again,
        sent_again_in_halves=merge(halves),
    )


@contextmanager
def fake_ranks(tp_degree: int, cp_degree: int = 1) -> Iterator[DeviceMesh | None]:
    """Be rank 0 of absent ranks; yield their mesh of ``tp`` or ``cp, tp``, None for one rank."""
    if tp_degree * cp_degree == 1:
        yield None
        return
    sizes = {"cp": cp_degree, "tp": tp_degree} if cp_degree > 1 else {"tp": tp_degree}
    with fake_process_group(tp_degree * cp_degree):
        yield init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


@dataclass
class _Run:
    recorder: Recorder
    kept: int  # bytes after forward
    sent: list[Traffic]  # what recomputation sends, and what context parallelism gathers again


def _run(
    workload: Workload, mesh: DeviceMesh | None, prepare: Prepare | None, in_halves: bool = False
) -> _Run:
    """Run a model forward and backward on tensors without data."""
    # With fake tensors in their place every operator takes twice as long.
    with ExitStack() as recording:
        gc.freeze()  # what is there already is not searched for what this run leaves
        recording.callback(gc.unfreeze)
        model = _build(workload, mesh, prepare)
        for parameter in model.parameters():
            # Whole gradients are counted elsewhere, by unit.
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        shape = workload.batch, workload.seq_len // workload.cp_degree
        tokens, places = (torch.zeros(shape, dtype=torch.long, device="meta") for _ in range(2))
        arguments = {"targets": tokens} | ({PLACES: places} if workload.cp_degree > 1 else {})
        outside = (*model.parameters(), tokens, places, model.freqs_cis)
        recorder = Recorder({storage_address(_storage(x)) for x in outside})
        ledger = None
        if mesh is not None:
            groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
            ledger = recording.enter_context(CommLedger([model], groups))
        recording.enter_context(recorder)
        recording.enter_context(functions_by(scaled_dot_product_attention=_attend))
        if workload.on_gpu:
            recording.enter_context(functions_by(rms_norm=recorder.rms_norm))
        x = tokens
        if in_halves:
            x = model.get_submodule("tok_embeddings")(tokens).detach().requires_grad_()
            model.tok_embeddings = None  # as in a later stage
        # Mostly the head computes the loss: its logits exist a chunk at a time.
        loss = summed_loss(model(x, **arguments), tokens)
        kept = recorder.bytes() - _storage(loss).nbytes()
        recorder.backward = True
        if in_halves:
            backward_in_halves(loss, x, list(model.parameters()))
        else:
            loss.backward()
    sent = []
    for row in ledger.rows(split_recompute=True) if ledger else ():
        gathers = row["mesh_dim"] == "cp" and row["op"] == "all_gather"
        if row["recompute"] or (gathers and row["pass"] == "backward"):
            # A wide one beside half precision is the norm's statistic.
            wide = row["dtype"] == "float32" and workload.dtype.itemsize < 4
            role, numbers = "statistic" if wide else "activation", (row["calls"], row["elements"])
            sent.append(
                Traffic(row["scope"], "backward", row["op"], role, *numbers, row["mesh_dim"])
            )
    return _Run(recorder, kept, sent)


def _build(workload: Workload, mesh: DeviceMesh | None, prepare: Prepare | None) -> LlamaModel:
    """Build a workload's model without data, split it over the mesh and wrap it."""
    with set_default_dtype(workload.dtype), torch.device("meta"):
        model = LlamaModel(replace(workload.args, max_seq_len=workload.seq_len))
    if mesh is not None:
        apply_tensor_parallel(model, mesh["tp"], workload.settings)
    if mesh is not None and workload.cp_degree > 1:
        apply_context_parallel(model, Ranks.of(mesh["cp"]), workload.gather)
        for module in model.modules():
            if isinstance(module, GatheredAttention):
                module.to_prefix = _attend
    if prepare is not None:
        prepare(model)
    return model


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
    # Torch chooses no fused kernel on ``meta``. Without a mask: a GPU has none of a rank's own
    # tokens to those of the row, which a CPU adds.
    out: Tensor = fused_attention(q, k, v, 0.0, is_causal)[0]
    return out


def _storage(x: Tensor) -> torch.UntypedStorage:
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.untyped_storage()
