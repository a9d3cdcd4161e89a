# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step-time model: products, element-wise kernels, the optimizer, and α-β for collectives.

A product takes its FLOPs over the speed of large products, plus its bytes over the memory
bandwidth, plus a launch: that both do not overlap fits BOOST's products on A100s
(``docs/results.md``). Fused attention has a speed of its own; other kernels take their bytes and a
launch. A collective of N ranks costs α per call, plus its bytes times the share that crosses a link
(2(N-1)/N for an all-reduce, (N-1)/N for a gather, a scatter or an all-to-all, 1 for a message) over
the link's bandwidth. Tensor-parallel activations and messages are exposed, and so is TSR-Adam's
traffic; the online norm's statistic and data-parallel traffic only where they take longer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from torchtitan_lr.costs.described_run import Run, blocks_of
from torchtitan_lr.costs.hardware import Hardware, MeshDim
from torchtitan_lr.costs.kernels import Work
from torchtitan_lr.costs.messages import Traffic, element_size
from torchtitan_lr.costs.schedule import StageSeconds, makespan, pipeline_order
from torchtitan_lr.costs.work import PassWork

_WIRE_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

_OVERLAPPED = ("parameter", "gradient", "index", "statistic")
"""Roles whose collectives overlap with computation in forward and backward."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step of one rank."""

    compute: float  # time of matrix products, attention included
    exposed_communication: float  # communication that does not overlap with computation
    hidden_communication: float  # communication that overlaps with computation
    bubble: float = 0.0
    element_wise: float = 0.0  # time of all other kernels of forward and backward
    optimizer: float = 0.0  # time of the optimizer's kernels

    @property
    def total(self) -> float:
        """Sum of all parts but hidden communication."""
        device = self.compute + self.element_wise + self.optimizer
        return device + self.exposed_communication + self.bubble


def compute_seconds(flops: float, hardware: Hardware) -> float:
    """Return the modelled time of matrix products."""
    return flops / (hardware.peak_tflops * 1e12 * hardware.matmul_efficiency)


def product_seconds(work: Work, hardware: Hardware) -> float:
    """Return the modelled time of a work's products and attention."""
    seconds = compute_seconds(work.attention / hardware.attention_share, hardware)
    gbytes = hardware.product_gbytes_per_s or hardware.memory_gbytes_per_s
    for product, calls in work.products.items():
        moved = product.bytes / (gbytes * 1e9)
        once = compute_seconds(product.flops, hardware) + moved + hardware.kernel_us * 1e-6
        seconds += calls * once
    return seconds


def element_wise_seconds(work: Work, hardware: Hardware) -> float:
    """Return the modelled time of a work's other kernels."""
    kernels = work.kernels - sum(work.products.values())
    return kernels * hardware.kernel_us * 1e-6 + moved_seconds(work.traffic, hardware)


def moved_seconds(traffic: float, hardware: Hardware) -> float:
    """Return the modelled time of bytes that kernels read and write."""
    return traffic / (hardware.memory_gbytes_per_s * 1e9)


def model_step_time(
    compute: float,
    traffic: Iterable[Traffic],
    element_size: Callable[[Traffic], int],
    mesh: dict[str, MeshDim],
    hardware: Hardware,
    element_wise: float = 0.0,
    optimizer: float = 0.0,
) -> StepTime:
    """Model one optimizer step of one rank."""
    exposed, overlapped = 0.0, 0.0
    for row in traffic:
        seconds = collective_seconds(row, element_size(row), mesh[row.mesh_dim], hardware)
        if row.role in _OVERLAPPED and row.pass_ != "optimizer":
            overlapped += seconds
        else:
            exposed += seconds
    hidden = min(overlapped, compute + element_wise)
    exposed += overlapped - hidden
    return StepTime(compute, exposed, hidden, 0.0, element_wise, optimizer)


def exposed_seconds(
    traffic: Iterable[Traffic],
    element_size: Callable[[Traffic], int],
    mesh: dict[str, MeshDim],
    hardware: Hardware,
) -> dict[str, float]:
    """Return the exposed seconds of activation collectives and messages, by pass."""
    seconds = {"forward": 0.0, "backward": 0.0}
    for row in traffic:
        if row.pass_ in seconds and row.role not in _OVERLAPPED:
            dim = mesh[row.mesh_dim]
            seconds[row.pass_] += collective_seconds(row, element_size(row), dim, hardware)
    return seconds


def collective_seconds(row: Traffic, element_size: int, dim: MeshDim, hardware: Hardware) -> float:
    """Return the modelled time of a row of collectives; a message counts on its sender."""
    if dim.size == 1 or row.op == "recv":
        return 0.0
    # A message goes to one neighbour; a collective spans the whole dimension.
    reach = 2 * dim.stride if row.op == "send" else dim.size * dim.stride
    within_node = reach <= hardware.devices_per_node
    gbytes = hardware.intra_node_gbytes_per_s if within_node else hardware.inter_node_gbytes_per_s
    if within_node and hardware.direct_links:
        gbytes *= (dim.size - 1 if row.op != "send" else 1) / (hardware.devices_per_node - 1)
    share = _WIRE_SHARE[row.op] * (dim.size - 1) / dim.size if row.op in _WIRE_SHARE else 1.0
    wire = share * row.elements * element_size / (gbytes * 1e9)
    return row.calls * hardware.latency_us * 1e-6 + wire


def step_time(
    run: Run, traffic: list[list[Traffic]], hardware: Hardware, work: PassWork
) -> StepTime:
    """Model a step on the pipeline rank that is busy longest."""
    sizes = partial(element_size, dtypes=run.wire_dtypes)
    times = []
    for pp_rank, rows in enumerate(traffic):
        passes = []
        for stage in run.stages_of(pp_rank):
            passes += _passes(run, stage, hardware, work)
        count = run.microbatches * run.accumulation
        products, others = (sum(part) * count for part in zip(*passes, strict=True))
        others += _staging_seconds(run, pp_rank, hardware)
        own = optimizer_seconds(run, pp_rank, hardware)
        times.append(model_step_time(products, rows, sizes, run.mesh, hardware, others, own))
    longest = max(times, key=lambda time: time.total)
    if run.pp == 1:
        return longest
    return replace(longest, bubble=_bubble(run, traffic, hardware, work))


def optimizer_seconds(run: Run, pp_rank: int, hardware: Hardware) -> float:
    """Return the modelled time of the optimizer's kernels in a step."""
    work = run.optimizer.work(pp_rank)
    if run.entry.tf32_products and run.config.training.mixed_precision_param != "float32":
        products = 2 * compute_seconds(work.flops, hardware)  # TF32 has half the speed of bf16
    else:
        products = fp32_seconds(work.flops, hardware)
    launches = work.kernels * hardware.kernel_us * 1e-6
    return moved_seconds(work.traffic, hardware) + products + launches


def fp32_seconds(flops: float, hardware: Hardware) -> float:
    """Return the modelled time of products in fp32 without TF32."""
    peak = hardware.fp32_tflops or hardware.peak_tflops
    return flops / (peak * 1e12 * hardware.matmul_efficiency)


def _staging_seconds(run: Run, pp_rank: int, hardware: Hardware) -> float:
    """Return the copies of weights out of FSDP's gathers and of gradients into its reductions."""
    sizes = run.precision
    if run.shard == 1 and sizes.compute == sizes.parameter:
        return 0.0
    elements = sum(map(prod, run.shapes_of(pp_rank).values()))
    gathers = 2 if run.reshards else 1
    per_element = gathers * 2 * sizes.compute + sizes.compute + sizes.reduce
    return moved_seconds(run.accumulation * per_element * elements, hardware)


def _bubble(run: Run, traffic: list[list[Traffic]], hardware: Hardware, work: PassWork) -> float:
    """Seconds from the first action to the last in which the busiest rank waits."""
    sizes = partial(element_size, dtypes=run.wire_dtypes)
    stages = [StageSeconds(0, 0)] * len(run.stages)
    for pp_rank, rows in enumerate(traffic):
        mine = run.stages_of(pp_rank)
        exposed = exposed_seconds(rows, sizes, run.mesh, hardware)
        passes = len(mine) * run.microbatches * run.accumulation
        for stage in mine:
            forward, backward = (sum(each) for each in _passes(run, stage, hardware, work))
            stages[stage] = StageSeconds(
                forward + exposed["forward"] / passes, backward + exposed["backward"] / passes
            )
    schedule = run.config.parallelism.pipeline_parallel_schedule
    per_rank = len(run.stages) // run.pp
    orders = pipeline_order(schedule, run.pp, per_rank, run.microbatches)
    busiest = 0.0
    for pp_rank in range(run.pp):
        busy = sum(stages[s].forward + stages[s].backward for s in run.stages_of(pp_rank))
        busiest = max(busiest, run.microbatches * busy)
    return run.accumulation * (makespan(orders, stages) - busiest)


def _passes(run: Run, stage: int, hardware: Hardware, work: PassWork) -> list[tuple[float, float]]:
    """Seconds of products and of other kernels, forward and backward of a micro-batch."""
    units, seconds = run.stages[stage], []
    for block, ends in zip(work.block, work.ends, strict=True):
        # The embedding counts with the head.
        mine = Work().plus(block, blocks_of(units)).plus(ends, float("head" in units))
        seconds.append((product_seconds(mine, hardware), element_wise_seconds(mine, hardware)))
    return seconds
