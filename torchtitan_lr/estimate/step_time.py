# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step-time model: matrix products at a measured fraction of the peak, α-β for collectives.

The model omits kernel launches, the optimizer and element-wise work, and uses one efficiency for
all products, which thin ones do not reach. Its times are therefore too short, more so for low-rank
plans than for full rank, and a ratio of two modelled times does not bound the measured ratio.

A collective of N ranks costs α per call, plus its bytes times the share that crosses a link
(2(N-1)/N for an all-reduce, (N-1)/N for a gather, a scatter or an all-to-all, 1 for a message) over
the link's bandwidth. Tensor-parallel activations and pipeline messages lie between two products and
are exposed. The online norm's statistic and data-parallel traffic overlap with computation and are
exposed only where they take longer. TSR-Adam's traffic at the end of a step is exposed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchtitan_lr.formulas.traffic import Traffic

_WIRE_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

_BESIDE = ("parameter", "gradient", "index", "statistic")
"""Roles whose collectives overlap with computation in forward and backward."""


@dataclass(frozen=True)
class Hardware:
    """A kind of machine, described by a file in ``scripts/hardware/``.

    Args:
        name: Display name.
        peak_tflops: Dense bf16 peak of a device, TFLOP/s.
        matmul_efficiency: Fraction of the peak that large products reach, at most 1.
        memory_gib: Memory of a device, GiB.
        devices_per_node: Devices connected by the fast link.
        intra_node_gbytes_per_s: Bandwidth of that link per device and direction, GB/s.
        inter_node_gbytes_per_s: Bandwidth between nodes per device and direction, GB/s.
        latency_us: α, microseconds per collective.
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
    """A mesh dimension: its size, and the distance of neighbours in global ranks."""

    size: int
    stride: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step of one rank.

    Args:
        compute: Time of matrix products.
        exposed_communication: Communication that does not overlap with computation.
        hidden_communication: Communication that overlaps with computation.
        bubble: Idle time in the pipeline.
    """

    compute: float
    exposed_communication: float
    hidden_communication: float
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Sum of compute, exposed communication and bubble."""
        return self.compute + self.exposed_communication + self.bubble


def compute_seconds(flops: float, hardware: Hardware) -> float:
    """Return the modelled time of matrix products."""
    return flops / (hardware.peak_tflops * 1e12 * hardware.matmul_efficiency)


def model_step_time(
    compute: float,
    traffic: Iterable[Traffic],
    element_size: Callable[[Traffic], int],
    mesh: dict[str, MeshDim],
    hardware: Hardware,
    bubble: float = 0.0,
) -> StepTime:
    """Model one optimizer step of one rank.

    Args:
        compute: Seconds of its products, recomputation included.
        traffic: Every collective of the step.
        element_size: Returns the bytes per element of a row.
        mesh: Mesh dimensions by name; must contain every dimension in `traffic`.
        hardware: The machine.
        bubble: Idle seconds of the pipeline rank.
    """
    exposed, beside = 0.0, 0.0
    for row in traffic:
        seconds = collective_seconds(row, element_size(row), mesh[row.mesh_dim], hardware)
        if row.role in _BESIDE and row.pass_ != "optimizer":
            beside += seconds
        else:
            exposed += seconds
    hidden = min(beside, compute)
    return StepTime(compute, exposed + beside - hidden, hidden, bubble)


def exposed_seconds(
    traffic: Iterable[Traffic],
    element_size: Callable[[Traffic], int],
    mesh: dict[str, MeshDim],
    hardware: Hardware,
) -> dict[str, float]:
    """Return the exposed seconds of activation collectives and messages, by pass."""
    seconds = {"forward": 0.0, "backward": 0.0}
    for row in traffic:
        if row.pass_ in seconds and row.role not in _BESIDE:
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
    share = _WIRE_SHARE[row.op] * (dim.size - 1) / dim.size if row.op in _WIRE_SHARE else 1.0
    wire = share * row.elements * element_size / (gbytes * 1e9)
    return row.calls * hardware.latency_us * 1e-6 + wire
