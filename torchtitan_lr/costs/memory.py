# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Memory of a rank of a run, part by part, and the size of its checkpoints."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torchtitan_lr.costs.described_run import Precision, Run, blocks_of, elements
from torchtitan_lr.costs.optimizer_costs import NamedShapes
from torchtitan_lr.costs.rehearsal import Rehearsal, rehearse_run
from torchtitan_lr.costs.schedule import most_in_flight, pipeline_order
from torchtitan_lr.costs.step_traffic import boundaries_of, exchanged_units

ROTARY_BYTES = 8  # an entry of the rotary table, complex64
KEEPS_WITHIN = 0.9  # of a GPU's memory: up to here inputs of products are kept


def static_memory(run: Run, pp_rank: int, shard_rank: int = 0) -> dict[str, int]:
    """Return the bytes that a rank holds during the whole run, exactly, without buffers."""
    pieces = run.pieces_of(pp_rank, shard_rank)
    weights = run.precision.parameter * elements(pieces)
    state = run.optimizer.state_bytes(pieces) + run.outer.state_bytes(pieces)
    return {"weights": weights, "gradients": weights, "optimizer": state}


def rank_memory(
    run: Run, pp_rank: int, rehearsal: Rehearsal, on_gpu: bool = True
) -> dict[str, int]:
    """Return the bytes of every part on the first FSDP rank of a pipeline rank, and their peak.

    Gradients grow while activations are used up, so that the peak is less than the sum: both are
    there at once only where an earlier micro-batch left its gradients. Where some steps are eager
    among captured ones, the graphs' pool has as much again.
    """
    parts = static_memory(run, pp_rank)
    parts["activations"] = in_flight(run, pp_rank, rehearsal)[0]
    parts["working"] = rehearsal.working
    parts["buffers"] = buffer_bytes(run, pp_rank)
    begins = parts["activations"] + parts["working"]
    ends = parts["gradients"] + round(rehearsal.block)
    moving = parts["gradients"] + begins if run.rounds > 1 else max(begins, ends)
    parts["graphs"] = moving if on_gpu and run.captured and run.steps_differ else 0
    if run.outer.every:  # an exchange comes after backward
        pieces = run.pieces_of(pp_rank)
        moving += run.outer.travelling_bytes(pieces)
        moving = max(moving, parts["gradients"] + run.outer.exchange_bytes(pieces))
    standing = parts["weights"] + parts["optimizer"] + parts["buffers"] + parts["graphs"]
    return parts | {"peak": standing + moving}


def rank_memories(run: Run, on_gpu: bool = True) -> list[dict[str, int]]:
    """Return `rank_memory` of every pipeline rank."""
    rehearsal = rehearse_run(run, on_gpu=on_gpu)
    return [rank_memory(run, rank, rehearsal, on_gpu) for rank in range(run.pp)]


def largest_peak(memories: Iterable[Mapping[str, int]]) -> int:
    """Return the peak of the rank that needs most."""
    # The first stage keeps most micro-batches, but one in the middle may have more blocks.
    return max(parts["peak"] for parts in memories)


def with_kept_inputs(run: Run, memory: float) -> Run:
    """Decide ``activation_checkpoint.keep_inputs`` = auto of a run on GPUs with so many bytes."""
    section = run.config.activation_checkpoint
    decides = section.keep_inputs == "auto" and section.mode == "none" and run.args.low_rank
    # Plans of several ranks mostly keep inputs anyway. What another optimizer needs is not known.
    if not decides or run.tp > 1 or run.entry.cost is None:
        return run
    config = replace(run.config, activation_checkpoint=replace(section, keep_inputs="on"))
    keeping = replace(run, config=config)
    return keeping if largest_peak(rank_memories(keeping)) <= KEEPS_WITHIN * memory else run


def in_flight(run: Run, pp_rank: int, rehearsal: Rehearsal) -> tuple[int, int]:
    """Return the bytes that micro-batches keep for backward, without masks, and their number."""
    sizes = {
        stage: len(blocks_of(run.stages[stage])) * rehearsal.block
        + ("head" in run.stages[stage]) * rehearsal.ends
        for stage in run.stages_of(pp_rank)
    }
    if run.pp == 1:
        return round(sizes[0]), 1
    schedule = run.config.parallelism.pipeline_parallel_schedule
    order = pipeline_order(schedule, run.pp, len(sizes), run.microbatches)[pp_rank]
    size, count = most_in_flight(order, sizes)
    return round(size), count


def buffer_bytes(run: Run, pp_rank: int) -> int:
    """Return what a rank holds besides parameters, their state and activations."""
    units, stages, precision = run.units_of(pp_rank), run.stages_of(pp_rank), run.precision
    total = len(stages) * run.seq_len * (run.args.head_dim // 2) * ROTARY_BYTES
    # Added up over micro-batches in fp32 or wider
    whole_gradients = max(4, precision.compute) * sum(map(elements, units.values()))
    if run.shard > 1 or precision.compute != precision.parameter:
        total += gathered_unit_bytes(units.values(), units.get("head"), run.reshards, precision)
    if run.shard > 1 and run.pp > 1 and run.microbatches > 1:
        total += whole_gradients  # of the micro-batches so far
    if run.compresses:
        # Twice if a step may be skipped: the residuals after and before the step.
        total += _residual_bytes(run) * (1 + run.compression.revocable)
        if run.accumulation > 1 and run.replicas == 1:
            total += whole_gradients
    total += run.optimizer.buffer_bytes(run.pieces_of(pp_rank))
    if run.pp > 1:
        # Torch's buffers: one for every micro-batch, boundary and direction that is received.
        boundaries = boundaries_of(run)
        received = sum(boundaries[stage - 1] for stage in stages if stage)
        received += sum(boundaries[stage] for stage in stages if stage < len(boundaries))
        total += precision.compute * run.microbatches * run.microbatch * received
    return total


def gathered_unit_bytes(
    units: Iterable[NamedShapes], head: NamedShapes | None, reshards: bool, precision: Precision
) -> int:
    """Return the peak bytes of FSDP2's gathered weights and of the gradients in reduction.

    With resharding these are the weights of the head (first in backward, so kept) or one more
    block, of the running block and of the prefetched one, and one unit's gradients in both dtypes.
    """
    sizes = sorted(map(elements, units))
    gradient = precision.compute + precision.reduce
    if not reshards:
        return precision.compute * sum(sizes) + gradient * sizes[-1]
    last = elements(head) if head else 0
    if head:
        sizes.remove(last)
    # The median unit is a block: only the embedding and the head have other sizes.
    block = sizes[len(sizes) // 2] if len(sizes) > 1 else sizes[0]
    in_head = precision.compute * (last + block) + gradient * last
    in_block = precision.compute * 2 * block + gradient * block + precision.reduce * last
    return max(in_head, in_block)


def checkpoint_bytes(run: Run) -> dict[str, int]:
    """Return the bytes of a checkpoint of all ranks together by part; each tensor is in it once."""
    weights = run.precision.parameter * elements(run.global_shapes)
    parts = {"weights": weights, "optimizer": run.optimizer.state_bytes(run.global_shapes)}
    if run.outer.every:  # a momentum; and of each replica states, weights and a residual
        own = parts["optimizer"] + (run.outer.copies - 1) * weights
        parts["optimizer"] = weights + run.replicas * own
    if run.compresses:
        parts["residuals"] = _residual_bytes(run) * run.world
    return parts


def _residual_bytes(run: Run) -> int:
    """Return the bytes of one number per compressed entry that a rank contributes to."""
    return 4 * sum(unit.ranks * unit.compressed for unit in exchanged_units(run).values())
