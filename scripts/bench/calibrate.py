# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure this machine for `torchtitan-lr estimate`, and write its hardware file.

    python -m scripts.bench.calibrate --out here.toml            # one device
    torchrun --nproc_per_node 2 -m scripts.bench.calibrate --out here.toml  # and its links
    torchtitan-lr estimate CONFIG --hardware here.toml

Without torchrun the links are assumed: a quarter of the memory's bandwidth, 30 µs.

Times matrix products of many shapes, fused attention, element-wise kernels on large and on tiny
tensors, and with several ranks all-reduces. The speed of products is fitted to all shapes, with the
bandwidth and the time of a launch as measured. On a CPU the time is this process's CPU time with
one thread, so that other processes disturb it less, in fp32; on a GPU it is the device's, in bf16.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.kernels import Work, product_work
from torchtitan_lr.costs.step_time import product_seconds
from torchtitan_lr.errors import ConfigError


@dataclass(frozen=True)
class Bench:
    """How kernels are timed here."""

    device: torch.device
    dtype: torch.dtype
    repeats: int  # timed calls of each
    megabytes: float  # of a large tensor

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """Return the median seconds of a call; ``times`` calls are timed at once."""
        call()
        found = []
        for _ in range(self.repeats):
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(times):
                    call()
                end.record()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end) / 1e3 / times)
            else:
                start = time.process_time()
                for _ in range(times):
                    call()
                found.append((time.process_time() - start) / times)
        return median(found)

    def tensor(self, *shape: int) -> Tensor:
        """Return normal random numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


Shape = tuple[int, int, int]  # a product (m, k) by (k, n): m, n and k
Timed = list[tuple[Work, float]]  # products, and the seconds of each


def time_products(bench: Bench, shapes: Sequence[Shape]) -> Timed:
    """Return the work and the seconds of products."""
    found = []
    for m, n, k in shapes:
        a, b = bench.tensor(m, k), bench.tensor(n, k)
        seconds = bench.seconds(lambda a=a, b=b: a @ b.t(), times=3)  # type: ignore[misc]
        found.append((product_work(1, m, n, k, a.element_size()), seconds))
    return found


def time_memory(bench: Bench) -> float:
    """Return bytes per second of element-wise kernels: a sum, a product, SiLU and a softmax."""
    rows = max(8, round(bench.megabytes * 1e6 / 1024 / bench.dtype.itemsize))
    x, y = bench.tensor(rows, 1024), bench.tensor(rows, 1024)
    size = x.numel() * x.element_size()
    calls: list[tuple[Callable[[], object], int]] = [
        (lambda: x + y, 3),
        (lambda: x * y, 3),
        (lambda: F.silu(x), 2),
        (lambda: torch.log_softmax(x, -1), 2),
    ]
    seconds = sum(bench.seconds(call) for call, _ in calls)
    return sum(passes for _, passes in calls) * size / seconds


def time_launch(bench: Bench) -> float:
    """Return the seconds of a kernel on a few numbers, a step of autograd included."""
    x, y = bench.tensor(8).requires_grad_(), bench.tensor(8)

    def chain() -> None:
        z = x
        for _ in range(20):
            z = z * y
        z.sum().backward()

    return bench.seconds(chain, times=5) / 42


def time_attention(bench: Bench, length: int) -> float:
    """Return FLOPs per second of causal attention, forward and backward, below the diagonal."""
    q, k, v = (bench.tensor(2, 8, length, 64).requires_grad_() for _ in range(3))

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return 7 * q.numel() * length / bench.seconds(both)


def time_links(bench: Bench) -> tuple[float, float]:
    """Return the seconds of a tiny all-reduce, and the bytes per second of a large one's wire."""
    ranks = dist.get_world_size()
    found = []
    for count in (8, max(8, round(bench.megabytes * 1e6 / bench.dtype.itemsize))):
        x, times = torch.zeros(count, device=bench.device, dtype=bench.dtype), []
        for _ in range(bench.repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(x)
            if bench.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        # Other load only adds time.
        found.append((min(times[1:]), x.numel() * x.element_size()))
    (latency, _), (large, size) = found
    return latency, 2 * (ranks - 1) / ranks * size / max(large - latency, 1e-9)


CACHED = 1e15
"""Bytes per second of products whose bytes take no time that can be seen."""


def _moved(work: Work) -> float:
    """Return the bytes of products."""
    return sum(number * size for (_, size), number in work.products.items())


def fit_bandwidth(timed: Timed, launch: float) -> float:
    """Return bytes per second of products, by least squares of modelled over measured time."""
    rows = torch.tensor([[p.flops / t, _moved(p) / t] for p, t in timed], dtype=torch.float64)
    rest = torch.tensor([[1 - launch / t] for _, t in timed], dtype=torch.float64)
    scale = rows.norm(dim=0)  # FLOPs and bytes differ by orders of magnitude
    per_flop, per_byte = (torch.linalg.lstsq(rows / scale, rest).solution[:, 0] / scale).tolist()
    # Times with much noise may fit a negative share of either.
    return min(CACHED, 1 / per_byte) if min(per_flop, per_byte) > 0 else CACHED


def fit_speed(timed: Timed, shapes: Sequence[Shape], memory: float, launch: float) -> float:
    """Return FLOPs per second of large products, by least squares of modelled over measured time.

    A ConfigError says that bytes and launches alone take longer than the products did.
    """
    at_once = [p.flops / t for p, t in timed]
    share = [1 - (launch + _moved(p) / memory) / t for p, t in timed]
    inverse = sum(a * b for a, b in zip(at_once, share, strict=True))
    if inverse <= 0:
        sizes = " ".join(f"{m}x{n}x{k}" for m, n, k in shapes)
        raise ConfigError("--shapes", sizes, "larger products: these take as long as their bytes")
    return sum(a * a for a in at_once) / inverse


def calibrate(
    bench: Bench,
    shapes: Sequence[Shape],
    length: int,
    links: tuple[float, float] | None = None,
) -> tuple[Hardware, list[list[str]]]:
    """Measure the machine.

    On a CPU products have a bandwidth of their own, that of its caches.

    Args:
        bench: How kernels are timed.
        shapes: Products (m, n, k) to time.
        length: Sequence length of the attention to time.
        links: Seconds of a tiny all-reduce and bytes per second of a large one, if they are known.

    Returns:
        The machine, and rows of every product: shape, microseconds, TFLOP/s, modelled over
        measured time.
    """
    memory, launch = time_memory(bench), time_launch(bench)
    timed = time_products(bench, shapes)
    cuda = bench.device.type == "cuda"
    # What `time_launch` finds on a CPU is autograd's work, of which there is none around these.
    cached = 0.0 if cuda else fit_bandwidth(timed, 0)
    speed = fit_speed(timed, shapes, cached or memory, launch if cuda else 0)
    peak = max(speed, *(p.flops / t for p, t in timed))
    if links is None:
        links = time_links(bench) if dist.is_initialized() else (30e-6, memory / 4)
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, one thread"
    total = torch.cuda.get_device_properties(0).total_memory if cuda else _cpu_memory()
    machine = Hardware(
        name=f"{name}, calibrated",
        peak_tflops=peak / 1e12,
        matmul_efficiency=speed / peak,
        memory_gib=total / 2**30,
        devices_per_node=torch.cuda.device_count() if cuda else os.cpu_count() or 1,
        intra_node_gbytes_per_s=links[1] / 1e9,
        inter_node_gbytes_per_s=links[1] / 1e9,
        latency_us=links[0] * 1e6,
        memory_gbytes_per_s=memory / 1e9,
        kernel_us=launch * 1e6,
        attention_share=time_attention(bench, length) / speed,
        product_gbytes_per_s=cached / 1e9,
    )
    rows = [
        [
            f"{m} x {n} x {k}",
            f"{1e6 * t:.0f}",
            f"{p.flops / t / 1e12:.4f}",
            f"{product_seconds(p, machine) / t:.2f}",
        ]
        for (m, n, k), (p, t) in zip(shapes, timed, strict=True)
    ]
    return machine, rows


def _cpu_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def as_toml(machine: Hardware) -> str:
    """Return the text of a hardware file."""
    lines = ["# Written by -m scripts.bench.calibrate; for `torchtitan-lr estimate --hardware`"]
    for field in fields(Hardware):
        value = getattr(machine, field.name)
        if field.default == value and not value:
            continue  # it is that of another field, or unknown
        if isinstance(value, float):
            value = float(f"{value:.5g}")
        lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


CPU_SHAPES = [(m, n, k) for m in (256, 1024) for n, k in ((1024, 256), (256, 1024), (512, 512))]
CPU_SHAPES += [(1024, 64, 512), (1024, 512, 64), (512, 256, 1024), (256, 64, 256), (512, 2048, 512)]
GPU_SHAPES = [(m, n, k) for m in (4096, 16384) for n, k in ((4096, 4096), (1024, 4096))]
GPU_SHAPES += [(16384, n, k) for n, k in ((4096, 1024), (256, 4096), (4096, 256), (1024, 1024))]
GPU_SHAPES += [(4096, 4096, 16384), (1024, 4096, 16384), (16384, 14336, 4096)]


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Write the file; print products and, if asked, steps. Returns the exit status."""
    options = _parse(argv)
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if cuda else "gloo")
        if cuda:
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    bench = Bench(device, dtype, options.repeats, options.megabytes)
    shapes = options.shapes or (GPU_SHAPES if cuda else CPU_SHAPES)
    try:
        machine, rows = calibrate(bench, shapes, options.length)
        first = not dist.is_initialized() or dist.get_rank() == 0
        if first:
            Path(options.out).write_text(as_toml(machine), encoding="utf-8")
            print(text_table(["product", "us", "TFLOP/s", "modelled/measured"], rows))
            print("\n" + "\n".join(f"{k:26}{v}" for k, v in asdict(machine).items()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _shape(text: str) -> tuple[int, int, int]:
    m, n, k = (int(part) for part in text.split("x"))
    return m, n, k


def _parse(argv: list[str] | None) -> Any:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE.toml", help="the file to write")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of every kernel")
    parser.add_argument("--megabytes", type=float, default=32, help="size of a large tensor")
    parser.add_argument("--length", type=int, default=256, help="sequence length")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="MxNxK", help="of products")
    options: argparse.Namespace = parser.parse_args(argv)
    if not options.out.endswith(".toml"):
        parser.error(f"--out: got {options.out!r}, expected a name that ends in .toml")
    check_at_least(options, repeats=1, megabytes=0.01, length=16)
    return options


if __name__ == "__main__":
    sys.exit(main())
