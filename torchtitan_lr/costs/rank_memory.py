# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Memory of a rank of a run, part by part."""

from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace

import torch

from torchtitan_lr.costs.described_run import Run, blocks_of
from torchtitan_lr.costs.held_memory import gathered_unit_bytes, static_memory
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.rehearsal import Rehearsal, Workload, fake_ranks, rehearse, run_once
from torchtitan_lr.costs.schedule import most_in_flight, pipeline_order
from torchtitan_lr.costs.step_traffic import boundaries_of, exchanged_units, repeated_row
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.recompute import (
    EAGER_MODES,
    apply_activation_checkpoint,
    wrapping_period,
)
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP

ROTARY_BYTES = 8  # an entry of the rotary table, complex64

_KNOWN: dict[str, Rehearsal] = {}


def rank_memory(run: Run, pp_rank: int, rehearsal: Rehearsal) -> dict[str, int]:
    """Return the bytes of every part on the first FSDP rank of a pipeline rank, and their peak.

    Gradients grow while activations are used up, so that the peak is less than the sum: both are
    there at once only where an earlier micro-batch left its gradients.
    """
    stages = []
    for stage in run.stages_of(pp_rank):
        shapes: dict[str, tuple[int, ...]] = {}
        for unit in run.stages[stage].values():
            shapes |= unit
        stages.append(shapes)
    parts = static_memory(
        stages, run.shard, run.precision, run.optimizer.state_bytes, by_columns=run.by_columns
    )
    parts["activations"] = in_flight(run, pp_rank, rehearsal)[0]
    parts["working"] = rehearsal.working
    parts["buffers"] = buffer_bytes(run, pp_rank)
    begins = parts["activations"] + parts["working"]
    ends = parts["gradients"] + round(rehearsal.block)
    accumulates = run.accumulation * run.microbatches > 1
    moving = parts["gradients"] + begins if accumulates else max(begins, ends)
    standing = parts["weights"] + parts["optimizer"] + parts["buffers"]
    return parts | {"peak": standing + moving}


def rehearse_run(run: Run, mode: str | None = None, fused_norm: bool = True) -> Rehearsal:
    """Rehearse a run's blocks; the compiler's own mode is a straight line between two others."""
    section = run.config.activation_checkpoint
    mode = run.checkpointing if mode is None else mode
    if mode not in EAGER_MODES:
        least, most, share = "full", "none", section.memory_budget
        bounds = rehearse_run(run, least, fused_norm), rehearse_run(run, most, fused_norm)
        block = bounds[0].block + share * (bounds[1].block - bounds[0].block)
        working = max(bound.working for bound in bounds)
        return replace(bounds[0], block=block, working=working)
    workload = workload_of(run)
    # Alternatives, and runs that differ in their ranks only, often have the same blocks.
    key = repr((workload, replace(section, mode=mode)))
    if key not in _KNOWN:
        period = wrapping_period(section, mode)
        _KNOWN[key] = rehearse(workload, checkpointing_of(run, mode), period)
    result = _KNOWN[key]
    if mode == "none" and run.tp == 1 and fused_norm:
        # The kernel of a norm keeps its input and the statistic; the CPU keeps the input and its
        # quotient by the rms, both in fp32 at least.
        wide = torch.promote_types(workload.dtype, torch.float32).itemsize
        saving = run.tokens * run.args.dim * (2 * wide - workload.dtype.itemsize)
        result = replace(result, block=result.block - 2 * saving, ends=max(0, result.ends - saving))
    return result


def repeated_by_block(run: Run) -> list[Traffic]:
    """Return what activation checkpointing sends again in a step, block by block."""
    mode = run.checkpointing
    if run.tp == 1 or mode == "none":
        return []
    if mode not in EAGER_MODES:
        *others, last = map(repr, EAGER_MODES)
        want = f"{', '.join(others)} or {last}: only the compiler knows what it repeats"
        raise ConfigError("activation_checkpoint.mode", mode, want)
    count = run.microbatches * run.accumulation
    # The whole model: LaX's first block has no latents to add, and checkpointing may leave some
    # blocks alone.
    with fake_ranks(run.tp, run.cp) as mesh:
        repeated = run_once(workload_of(run), mesh, checkpointing_of(run, mode)).repeated
    return [
        repeated_row(run, *what, count * calls, count * elements)
        for what, (calls, elements) in repeated.items()
        if what[1] != "cp"  # what attention gathers again in any backward
    ]


def workload_of(run: Run) -> Workload:
    """Return what a rank of a run computes for a micro-batch."""
    settings = run.settings if run.tp > 1 else TPSettings()  # ignored there
    dtype = TORCH_DTYPE_MAP[run.config.training.mixed_precision_param]
    shape = (run.args, settings, run.tp, run.microbatch, run.seq_len, dtype)
    return Workload(*shape, run.cp, run.gather, run.splits_backward)


def checkpointing_of(run: Run, mode: str) -> partial[None]:
    """Return what applies a mode of activation checkpointing to a model."""
    section = run.config.activation_checkpoint
    # Fake tensors have no generator whose state could be kept; it is a few kilobytes.
    section = replace(section, mode=mode, preserve_rng_state=False)
    config = SimpleNamespace(
        activation_checkpoint=section,
        compile=SimpleNamespace(enable=False, components=[]),
        job=SimpleNamespace(dump_folder=""),
    )
    return partial(apply_activation_checkpoint, job_config=config)


def in_flight(run: Run, pp_rank: int, rehearsal: Rehearsal) -> tuple[int, int]:
    """Return the bytes that micro-batches keep for backward, and how many (by stage) they are."""
    sizes = {
        stage: document_bytes(run)
        + blocks_of(run.stages[stage]) * rehearsal.block
        + ("head" in run.stages[stage]) * rehearsal.ends
        for stage in run.stages_of(pp_rank)
    }
    if run.pp == 1:
        return round(sizes[0]), 1
    schedule = run.config.parallelism.pipeline_parallel_schedule
    order = pipeline_order(schedule, run.pp, len(sizes), run.microbatches)[pp_rank]
    size, count = most_in_flight(order, sizes)
    return round(size), count


def document_bytes(run: Run) -> int:
    """Return what keeps documents apart on a GPU: indices, positions, rotary table and mask."""
    if not run.config.training.mask_documents:
        return 0
    by_token = 2 * torch.int64.itemsize + run.args.head_dim // 2 * ROTARY_BYTES
    return run.microbatch * (run.seq_len * by_token + mask_bytes(run.seq_len, run.cp))


def mask_bytes(seq_len: int, cp_degree: int = 1) -> int:
    """Return the bytes of ``flex_attention``'s mask of a row: lists of blocks of 128 tokens.

    Blocks of keys by a rank's blocks of queries, and the reverse, seen in part and whole.
    """
    keys, queries = -(-seq_len // 128), -(-seq_len // cp_degree // 128)
    return 2 * torch.int32.itemsize * (keys + queries + 2 * keys * queries)


def buffer_bytes(run: Run, pp_rank: int) -> int:
    """Return what a rank holds besides parameters, their state and activations."""
    units, precision = run.units_of(pp_rank), run.precision
    stages = run.stages_of(pp_rank)
    total = len(stages) * run.seq_len * (run.args.head_dim // 2) * ROTARY_BYTES
    elements = sum(map(prod, run.shapes_of(pp_rank).values()))
    if run.shard > 1 or precision.compute != precision.parameter:
        total += gathered_unit_bytes(units.values(), units.get("head"), run.reshards, precision)
    if run.shard > 1 and run.pp > 1 and run.microbatches > 1:
        total += precision.summed * elements  # whole gradients of the micro-batches so far
    if run.compresses:
        # Twice if a step may be skipped: the residuals after and before the step.
        total += _residual_bytes(run) * (1 + run.compression.revocable)
        if run.accumulation > 1 and run.replicas == 1:
            total += precision.summed * elements
    total += run.optimizer.buffer_bytes(run.pieces_of(pp_rank))
    if run.pp > 1:
        # Torch's buffers: one for every micro-batch, boundary and direction that is received.
        boundaries = boundaries_of(run)
        received = sum(boundaries[stage - 1] for stage in stages if stage)
        received += sum(boundaries[stage] for stage in stages if stage < len(boundaries))
        total += precision.compute * run.microbatches * run.microbatch * received
    return total


def checkpoint_bytes(run: Run) -> dict[str, int]:
    """Return the bytes of a checkpoint of all ranks together by part; each tensor is in it once."""
    static = static_memory([run.global_shapes], 1, run.precision, run.optimizer.state_bytes)
    parts = {part: static[part] for part in ("weights", "optimizer")}
    if run.compresses:
        parts["residuals"] = _residual_bytes(run) * run.world
    return parts


def _residual_bytes(run: Run) -> int:
    """Return the bytes of one number per compressed entry that a rank contributes to."""
    entries = sum(unit.ranks * unit.compressed for _, unit in exchanged_units(run))
    return 4 * entries
