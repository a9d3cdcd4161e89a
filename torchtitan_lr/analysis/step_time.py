# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A modelled step time: matrix products at a measured fraction of the peak, collectives by α-β.

The model leaves out what it cannot know (kernel launches, the optimizer, element-wise work), so its
times are lower bounds whose ratios between plans mean more than their values. A collective of N
ranks costs α a call, and its bytes times the share that crosses a link (2(N-1)/N for an all-reduce,
(N-1)/N for a gather or a scatter, 1 for a message) over the link's bandwidth. Tensor-parallel
activations stand between two products and are exposed; the online norm's statistic and the
data-parallel traffic run beside the computation and are exposed only where they take longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan_lr.analysis.communication import Traffic

_WIRE_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Hardware:
    """A kind of machine; the files of ``scripts/hardware/`` hold these.

    Args:
        name: For people.
        peak_tflops: Dense bf16 peak of a device.
        matmul_efficiency: Fraction of it that large products reach.
        memory_gib: Of a device.
        devices_per_node: Devices that the fast link joins.
        intra_node_gbytes_per_s: Bandwidth of that link, a device and direction, GB/s.
        inter_node_gbytes_per_s: Bandwidth between nodes, a device and direction, GB/s.
        latency_us: α, microseconds a collective.
    """

    name: str
    peak_tflops: float
    matmul_efficiency: float
    memory_gib: float
    devices_per_node: int
    intra_node_gbytes_per_s: float
    inter_node_gbytes_per_s: float
    latency_us: float


@dataclass(frozen=True)
class MeshDim:
    """A mesh dimension: its size, and how far apart its neighbours are in global ranks."""

    size: int
    stride: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step.

    Args:
        compute: Matrix products of this rank.
        exposed_communication: Time in which nothing else runs.
        hidden_communication: Time that passes beside computation.
        bubble: Idle time of a pipeline's ranks.
    """

    compute: float
    exposed_communication: float
    hidden_communication: float
    bubble: float

    @property
    def total(self) -> float:
        """Compute, exposed communication and bubble."""
        return self.compute + self.exposed_communication + self.bubble


def model_step_time(
    flops: float,
    traffic: Iterable[Traffic],
    element_sizes: dict[str, int],
    mesh: dict[str, MeshDim],
    hardware: Hardware,
    pipeline_ranks: int = 1,
    microbatches: int = 1,
) -> StepTime:
    """Model one optimizer step of one rank.

    Args:
        flops: Forward and backward products of this rank in the step, recomputation included.
        traffic: Every collective of the step.
        element_sizes: Bytes of an element by `Traffic.role`.
        mesh: Dimensions by name; of those that `traffic` names, all must be there.
        hardware: The machine.
        pipeline_ranks: Stages; (stages - 1) / microbatches of a step is bubble (1F1B, GPipe).
        microbatches: Micro-batches that pass through the pipeline in a step.
    """
    compute = flops / (hardware.peak_tflops * 1e12 * hardware.matmul_efficiency)
    exposed, beside = 0.0, 0.0
    for row in traffic:
        seconds = collective_seconds(row, element_sizes[row.role], mesh[row.mesh_dim], hardware)
        if row.role in ("parameter", "gradient", "statistic"):
            beside += seconds
        else:
            exposed += seconds
    hidden = min(beside, compute)
    bubble = (pipeline_ranks - 1) / microbatches * (compute + exposed)
    return StepTime(compute, exposed + beside - hidden, hidden, bubble)


def collective_seconds(row: Traffic, element_size: int, dim: MeshDim, hardware: Hardware) -> float:
    """Return the modelled time of equal collectives."""
    if dim.size == 1:
        return 0.0
    within_node = dim.size * dim.stride <= hardware.devices_per_node
    gbytes = hardware.intra_node_gbytes_per_s if within_node else hardware.inter_node_gbytes_per_s
    share = _WIRE_SHARE[row.op] * (dim.size - 1) / dim.size if row.op in _WIRE_SHARE else 1.0
    return row.calls * hardware.latency_us * 1e-6 + share * row.elements * element_size / (
        gbytes * 1e9
    )
