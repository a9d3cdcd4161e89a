# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A kind of machine, its links, and the files that describe one."""

from dataclasses import MISSING, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from torchtitan_lr.config.parse import check_toml, read_toml
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError, one_of, require


@dataclass(frozen=True)
class Hardware:
    """A kind of machine, described by a file in ``torchtitan_lr/costs/machines/``."""

    name: str
    peak_tflops: float  # dense bf16 peak of a device, TFLOP/s
    matmul_efficiency: float  # fraction of the peak that large products reach, at most 1
    memory_gib: float  # memory of a device, GiB
    devices_per_node: int  # devices connected by the fast link
    intra_node_gbytes_per_s: float  # bandwidth of that link per device and direction, GB/s
    inter_node_gbytes_per_s: float  # bandwidth between nodes per device and direction, GB/s
    latency_us: float  # α, microseconds per collective
    memory_gbytes_per_s: float = inf  # bandwidth of a device's memory that kernels reach, GB/s
    kernel_us: float = 0.0  # microseconds per kernel beyond its bytes and FLOPs
    attention_share: float = 1.0  # speed of fused attention over that of large products
    narrow_attention_share: float = 0.0  # with heads of 64 or less; by default the other's
    long_attention_share: float = 0.0  # with wider heads and at least 32,768 keys; likewise
    # Whether every pair of a node's devices has links of its own, as in nodes of four A100s without
    # a switch: then N devices have (N-1)/(devices_per_node-1) of the bandwidth among them
    direct_links: bool = False
    # Bandwidth at which the bytes of products count, GB/s; by default the memory's. A CPU's
    # products work on its caches.
    product_gbytes_per_s: float = 0.0
    # Whether a product takes the longer of the times of its FLOPs and of its bytes, not their sum
    products_overlap: bool = False
    # Peak of a device's fp32 products without TF32, TFLOP/s; by default ``peak_tflops``
    fp32_tflops: float = 0.0
    tf32_tflops: float = 0.0  # peak of those in TF32; by default half of ``peak_tflops``
    # Microseconds of the host for a micro-batch that is no graph: per kernel, per block, embedding
    # and head, and per parameter that FSDP2 holds
    host_kernel_us: float = 0.0
    host_unit_us: float = 0.0
    host_parameter_us: float = 0.0
    like: str = ""  # a shipped machine, which has the values that are not given


@dataclass(frozen=True)
class MeshDim:
    """A mesh dimension: its size, and the distance of neighbours in global ranks."""

    size: int
    stride: int


MACHINES = Path(__file__).parent / "machines"  # folder of the machines that come with the package

DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100_80g_nvlink",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}
"""These machines by what the driver calls their devices."""


def load_hardware(name: str) -> Hardware:
    """Read a machine's file by path or shipped name."""
    values, file = _values(name), Path(name).name
    for field in fields(Hardware):
        given = field.name in values or field.default is not MISSING
        require(given, f"{file}: {field.name}", None, "a value: it has no default")
    share = values["matmul_efficiency"]
    require(share <= 1, f"{file}: matmul_efficiency", share, "at most 1, a part of the peak")
    return Hardware(**values)


def _values(name: str) -> dict[str, Any]:
    path = user_path(name, "--hardware") if name.endswith(".toml") else MACHINES / f"{name}.toml"
    if not path.is_file():
        shipped = one_of(sorted(file.stem for file in MACHINES.glob("*.toml")), name)
        raise ConfigError("--hardware", name, f"a TOML file, or {shipped}")
    values = check_toml(read_toml(str(path), "--hardware"), Hardware, prefix=f"{path.name}: ")
    for key, value in values.items():
        fits = isinstance(value, str | bool) or 0 < value < inf
        require(fits, f"{path.name}: {key}", value, "a positive number")
    base = values.get("like", "")
    require(not base.endswith(".toml"), f"{path.name}: like", base, "the name of a shipped machine")
    return _values(base) | values if base else values
