# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step-time model: products, element-wise kernels, the optimizer, and α-β for collectives.

A product takes its FLOPs over the speed that large products reach, plus its bytes over the memory
bandwidth, plus the launch of a kernel. So thin products, which move many bytes per FLOP, are slow;
that products and memory do not overlap fits the products that BOOST's authors measured on A100s
(``docs/results.md``). Fused attention has a speed of its own. Other kernels take their bytes
over the memory bandwidth plus a launch.

A collective of N ranks costs α per call, plus its bytes times the share that crosses a link
(2(N-1)/N for an all-reduce, (N-1)/N for a gather, a scatter or an all-to-all, 1 for a message) over
the link's bandwidth. Tensor-parallel activations and pipeline messages lie between two products and
are exposed. The online norm's statistic and data-parallel traffic overlap with computation and are
exposed only where they take longer. TSR-Adam's traffic at the end of a step is exposed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from torchtitan_lr.estimate.kernels import Work
from torchtitan_lr.formulas.traffic import Traffic

_WIRE_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

_BESIDE = ("parameter", "gradient", "index", "statistic")
"""Roles whose collectives overlap with computation in forward and backward."""


@dataclass(frozen=True)
class Hardware:
    """A kind of machine, described by a file in ``torchtitan_lr/estimate/machines/``.

    Args:
        name: Display name.
        peak_tflops: Dense bf16 peak of a device, TFLOP/s.
        matmul_efficiency: Fraction of the peak that large products reach, at most 1.
        memory_gib: Memory of a device, GiB.
        devices_per_node: Devices connected by the fast link.
        intra_node_gbytes_per_s: Bandwidth of that link per device and direction, GB/s.
        inter_node_gbytes_per_s: Bandwidth between nodes per device and direction, GB/s.
        latency_us: α, microseconds per collective.
        memory_gbytes_per_s: Bandwidth of a device's memory that kernels reach, GB/s.
        kernel_us: Microseconds per kernel beyond its bytes and FLOPs.
        attention_share: Speed of fused attention over that of large products.
        direct_links: Whether every pair of a node's devices has links of its own, as in nodes of
            four A100s without a switch: then N devices have (N-1)/(devices_per_node-1) of the
            bandwidth among them.
        product_gbytes_per_s: Bandwidth at which the bytes of products count, GB/s; by default the
            memory's. A CPU's products work on its caches.
    """

    name: str
    peak_tflops: float
    matmul_efficiency: float
    memory_gib: float
    devices_per_node: int
    intra_node_gbytes_per_s: float
    inter_node_gbytes_per_s: float
    latency_us: float
    memory_gbytes_per_s: float = inf
    kernel_us: float = 0.0
    attention_share: float = 1.0
    direct_links: bool = False
    product_gbytes_per_s: float = 0.0


@dataclass(frozen=True)
class MeshDim:
    """A mesh dimension: its size, and the distance of neighbours in global ranks."""

    size: int
    stride: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step of one rank.

    Args:
        compute: Time of matrix products, attention included.
        exposed_communication: Communication that does not overlap with computation.
        hidden_communication: Communication that overlaps with computation.
        bubble: Idle time in the pipeline.
        element_wise: Time of all other kernels of forward and backward.
        optimizer: Time of the optimizer's kernels.
    """

    compute: float
    exposed_communication: float
    hidden_communication: float
    bubble: float = 0.0
    element_wise: float = 0.0
    optimizer: float = 0.0

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
    bubble: float = 0.0,
    element_wise: float = 0.0,
    optimizer: float = 0.0,
) -> StepTime:
    """Model one optimizer step of one rank.

    Args:
        compute: Seconds of its products, recomputation included.
        traffic: Every collective of the step.
        element_size: Returns the bytes per element of a row.
        mesh: Mesh dimensions by name; must contain every dimension in `traffic`.
        hardware: The machine.
        bubble: Idle seconds of the pipeline rank.
        element_wise: Seconds of its other kernels in forward and backward.
        optimizer: Seconds of its optimizer's kernels.
    """
    exposed, beside = 0.0, 0.0
    for row in traffic:
        seconds = collective_seconds(row, element_size(row), mesh[row.mesh_dim], hardware)
        if row.role in _BESIDE and row.pass_ != "optimizer":
            beside += seconds
        else:
            exposed += seconds
    hidden = min(beside, compute + element_wise)
    exposed += beside - hidden
    return StepTime(compute, exposed, hidden, bubble, element_wise, optimizer)


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
    if within_node and hardware.direct_links:
        gbytes *= (dim.size - 1 if row.op != "send" else 1) / (hardware.devices_per_node - 1)
    share = _WIRE_SHARE[row.op] * (dim.size - 1) / dim.size if row.op in _WIRE_SHARE else 1.0
    wire = share * row.elements * element_size / (gbytes * 1e9)
    return row.calls * hardware.latency_us * 1e-6 + wire
