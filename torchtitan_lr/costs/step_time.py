# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step-time model: products, element-wise kernels, the optimizer, and α-β for collectives.

A product takes its FLOPs over the speed of large products, its bytes over the memory bandwidth, and
a launch. On A100s both times add up, on H100s the longer one counts: so the products fit that
BOOST's authors and we have timed (``docs/results.md``). Fused attention has a speed of its own;
other kernels take their bytes and a launch. Where the host launches passes kernel by kernel, the
device may wait for it. A collective of N ranks costs α per call, plus its bytes times the share
that crosses a link (2(N-1)/N for an all-reduce, (N-1)/N for a gather, a scatter or an all-to-all, 1
for a message) over the link's bandwidth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lr.costs.described_run import Run, blocks_of, elements
from torchtitan_lr.costs.hardware import Hardware, MeshDim
from torchtitan_lr.costs.kernels import Work
from torchtitan_lr.costs.messages import Traffic, element_size
from torchtitan_lr.costs.rehearsal import Rehearsal
from torchtitan_lr.costs.schedule import makespan, pipeline_order
from torchtitan_lr.optim.entries import PRODUCTS

WIRE_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

NARROW, LONG = 64, 32768  # widths of heads and numbers of keys with a speed of their own

_OVERLAPPED = ("parameter", "gradient", "index", "statistic")
"""Roles whose collectives overlap with computation in forward and backward: they are exposed only
where they take longer. Others are exposed, and so is all that an optimizer sends."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step of one rank."""

    compute: float  # time of matrix products, attention included
    exposed_communication: float  # communication that does not overlap with computation
    hidden_communication: float  # communication that overlaps with computation
    bubble: float = 0.0
    element_wise: float = 0.0  # time of all other kernels of forward and backward
    optimizer: float = 0.0  # time of the optimizer's kernels
    host: float = 0.0  # time in which the device waits for the host to launch kernels

    @property
    def total(self) -> float:
        """Sum of all parts but hidden communication."""
        device = self.compute + self.element_wise + self.optimizer
        return device + self.exposed_communication + self.bubble + self.host


def product_seconds(work: Work, hardware: Hardware) -> float:
    """Return the modelled time of a work's products and attention."""
    speed = hardware.peak_tflops * 1e12 * hardware.matmul_efficiency  # FLOP/s
    gbytes = hardware.product_gbytes_per_s or hardware.memory_gbytes_per_s
    seconds = 0.0
    for (flops, size), number in work.products.items():
        computing, moving = flops / speed, size / (gbytes * 1e9)
        both = max(computing, moving) if hardware.products_overlap else computing + moving
        seconds += number * (both + hardware.kernel_us * 1e-6)
    for heads, flops in work.attention.items():
        seconds += flops / (speed * attention_share(*heads, hardware))
    return seconds


def attention_share(width: int, keys: int, hardware: Hardware) -> float:
    """Return the speed of fused attention over that of large products, by width of its heads."""
    own = 0.0
    if width <= NARROW:
        own = hardware.narrow_attention_share
    elif keys >= LONG:
        own = hardware.long_attention_share
    return own or hardware.attention_share


def kernel_seconds(work: Work, hardware: Hardware) -> float:
    """Return the modelled time of a work's other kernels."""
    moving = work.traffic / (hardware.memory_gbytes_per_s * 1e9)
    return moving + work.kernels * hardware.kernel_us * 1e-6


def communication_seconds(
    traffic: Iterable[Traffic],
    dtypes: Mapping[str, str],  # as in `element_size`
    mesh: Mapping[str, MeshDim],
    hardware: Hardware,
) -> dict[str, float]:
    """Return the modelled seconds of what is exposed, by pass, and of what may overlap."""
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "overlapped": 0.0}
    for row in traffic:
        overlaps = row.role in _OVERLAPPED and row.pass_ != "optimizer"
        took = collective_seconds(row, element_size(row, dtypes), mesh[row.mesh_dim], hardware)
        seconds["overlapped" if overlaps else row.pass_] += took
    return seconds


def exposed_and_hidden(sent: Mapping[str, float], computing: float) -> tuple[float, float]:
    """Split `communication_seconds` into what a rank waits for and what its computation hides."""
    hidden = min(sent["overlapped"], computing)
    return sum(sent.values()) - hidden, hidden


def collective_seconds(row: Traffic, itemsize: int, dim: MeshDim, hardware: Hardware) -> float:
    """Return the modelled time of a row of collectives; a message counts on its sender."""
    if dim.size == 1 or row.op == "recv":
        return 0.0
    # A message goes to one neighbour; a collective spans the whole dimension.
    reach = 2 * dim.stride if row.op == "send" else dim.size * dim.stride
    within_node = reach <= hardware.devices_per_node
    gbytes = hardware.intra_node_gbytes_per_s if within_node else hardware.inter_node_gbytes_per_s
    if within_node and hardware.direct_links:
        gbytes *= (dim.size - 1 if row.op != "send" else 1) / (hardware.devices_per_node - 1)
    share = WIRE_SHARE[row.op] * (dim.size - 1) / dim.size if row.op in WIRE_SHARE else 1.0
    wire = share * row.elements * itemsize / (gbytes * 1e9)
    return row.calls * hardware.latency_us * 1e-6 + wire


def step_time(
    run: Run, traffic: list[list[Traffic]], hardware: Hardware, rehearsal: Rehearsal
) -> StepTime:
    """Model a step, of ``traffic`` by pipeline rank, on the rank that is busy longest."""
    # By stage, of a micro-batch: the work of forward and of backward
    stages = [_passes(units, rehearsal) for units in run.stages]
    times = []
    seconds = [(0.0, 0.0)] * len(stages)  # by stage, with what they wait for
    for pp_rank, rows in enumerate(traffic):
        mine = run.stages_of(pp_rank)
        work = _staging(run, pp_rank)
        for stage in mine:
            for each in stages[stage]:
                work = work.plus(each, run.rounds)
        sent = communication_seconds(rows, run.wire_dtypes, run.mesh, hardware)
        compute, element_wise = product_seconds(work, hardware), kernel_seconds(work, hardware)
        device = compute + element_wise
        own = optimizer_seconds(run, pp_rank, hardware)
        travels = min(_travelling_seconds(run, pp_rank, device, hardware), sent["optimizer"])
        sent["optimizer"] -= travels
        sent["overlapped"] += travels
        exposed, hidden = exposed_and_hidden(sent, device)
        calls = sum(row.calls for row in rows if row.pass_ != "optimizer")
        host = host_seconds(run, pp_rank, work.launches + calls, hardware)
        waits = max(0.0, host - (device + exposed - sent["optimizer"]))
        times.append(StepTime(compute, exposed, hidden, 0.0, element_wise, own, waits))
        slower, count = 1 + waits / device, len(mine) * run.rounds
        for stage in mine:
            forward, backward = (
                slower * (product_seconds(each, hardware) + kernel_seconds(each, hardware))
                for each in stages[stage]
            )
            forward += sent["forward"] / count
            seconds[stage] = forward, backward + sent["backward"] / count
    longest = max(times, key=lambda time: time.total)
    return longest if run.pp == 1 else replace(longest, bubble=_bubble(run, seconds))


def _travelling_seconds(run: Run, pp_rank: int, busy: float, hardware: Hardware) -> float:
    """Return the part of outer steps' messages, in a mean step, that the next step hides."""
    rows = run.outer.exchanges(pp_rank) if run.outer.section.overlap else []
    seconds = 0.0
    for row in rows:
        itemsize = element_size(row, run.wire_dtypes)
        took = collective_seconds(row, itemsize, run.mesh[row.mesh_dim], hardware)
        seconds += min(took, busy) / run.outer.every
    return seconds


def _passes(units: Mapping[str, Any], rehearsal: Rehearsal) -> list[Work]:
    works = []
    for block, ends in zip(rehearsal.block_work, rehearsal.ends_work, strict=True):
        # The embedding counts with the head.
        works.append(Work().plus(block, len(blocks_of(units))).plus(ends, float("head" in units)))
    return works


def host_seconds(run: Run, pp_rank: int, kernels: float, hardware: Hardware) -> float:
    """Return the modelled time in which the host launches the passes of a step."""
    if run.captured:
        return 0.0
    units = run.units_of(pp_rank)
    took = kernels * hardware.host_kernel_us
    took += run.rounds * len(units) * hardware.host_unit_us
    if run.wrapped:
        took += run.rounds * sum(map(len, units.values())) * hardware.host_parameter_us
    return took * 1e-6


def _bubble(run: Run, seconds: Sequence[tuple[float, float]]) -> float:
    """Seconds from the first action to the last in which the busiest rank waits."""
    schedule = run.config.parallelism.pipeline_parallel_schedule
    orders = pipeline_order(schedule, run.pp, len(run.stages) // run.pp, run.microbatches)
    busiest = 0.0
    for pp_rank in range(run.pp):
        busiest = max(busiest, sum(sum(seconds[stage]) for stage in run.stages_of(pp_rank)))
    return run.accumulation * (makespan(orders, seconds) - run.microbatches * busiest)


def optimizer_seconds(run: Run, pp_rank: int, hardware: Hardware) -> float:
    """Return the modelled time of the optimizer's kernels in a step."""
    work = run.optimizer.work(pp_rank)
    peak = hardware.fp32_tflops or hardware.peak_tflops
    kind = run.entry.half_products
    if kind and run.config.training.mixed_precision_param != "float32":
        peak = hardware.peak_tflops / PRODUCTS[kind]
        if kind == "tf32" and hardware.tf32_tflops:
            peak = hardware.tf32_tflops
    products = work.flops / (peak * 1e12 * hardware.matmul_efficiency)
    return kernel_seconds(work, hardware) + products


def _staging(run: Run, pp_rank: int) -> Work:
    """Return FSDP2's casts and copies of weights into gathers and out of them, and of gradients."""
    if not run.wrapped:
        return Work()
    sizes, units = run.precision, run.units_of(pp_rank)
    numbers, own = sum(map(elements, units.values())), elements(run.pieces_of(pp_rank))
    gathers = 2 if run.reshards else 1
    moved = gathers * own * (sizes.parameter + sizes.compute)
    moved += numbers * (gathers * 2 * sizes.compute + sizes.compute + sizes.reduce)
    # A kernel per parameter and copy: torch joins some of a unit, and the fit of ``kernel_us`` had
    # all of them.
    kernels = 2 * gathers * sum(map(len, units.values())) + len(units)
    return Work(traffic=run.accumulation * moved, kernels=run.accumulation * kernels)
