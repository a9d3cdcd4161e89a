# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Timing of this machine's kernels and links, and small steps against their estimate.

`scripts/check/calibrate.py` is the command.
"""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.kernels import Product, Work
from torchtitan_lr.estimate.rehearsal import Workload
from torchtitan_lr.estimate.step_time import (
    Hardware,
    element_wise_seconds,
    moved_seconds,
    product_seconds,
)
from torchtitan_lr.estimate.timing import ADAMW_PASSES
from torchtitan_lr.estimate.work import rehearse_work
from torchtitan_lr.formulas.parameters import count_parameters
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families.registry import FAMILIES
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.tensor.plans import TPSettings


@dataclass(frozen=True)
class Bench:
    """How kernels are timed here.

    Args:
        device: Where they run.
        dtype: Their dtype.
        repeats: Timed calls of each.
        megabytes: Size of a large tensor.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int
    megabytes: float

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


def time_products(bench: Bench, shapes: Sequence[tuple[int, int, int]]) -> dict[Product, float]:
    """Return the seconds of products by shape."""
    found = {}
    for m, n, k in shapes:
        a, b = bench.tensor(m, k), bench.tensor(n, k)
        product = Product(1, m, n, k, a.element_size())
        found[product] = bench.seconds(lambda a=a, b=b: a @ b.t(), times=3)  # type: ignore[misc]
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


def fit_bandwidth(timed: dict[Product, float], launch: float) -> float:
    """Return bytes per second of products, by least squares of modelled over measured time.

    Args:
        timed: Measured seconds of products.
        launch: Seconds per kernel.
    """
    rows = torch.tensor([[p.flops / t, p.bytes / t] for p, t in timed.items()], dtype=torch.float64)
    rest = torch.tensor([[1 - launch / t] for t in timed.values()], dtype=torch.float64)
    scale = rows.norm(dim=0)  # FLOPs and bytes differ by orders of magnitude
    per_flop, per_byte = (torch.linalg.lstsq(rows / scale, rest).solution[:, 0] / scale).tolist()
    # Times with much noise may fit a negative share of either.
    return min(CACHED, 1 / per_byte) if min(per_flop, per_byte) > 0 else CACHED


def fit_speed(timed: dict[Product, float], memory: float, launch: float) -> float:
    """Return FLOPs per second of large products, by least squares of modelled over measured time.

    Args:
        timed: Measured seconds of products.
        memory: Bytes per second.
        launch: Seconds per kernel.

    Raises:
        ConfigError: Bytes and launches alone take longer than the products did.
    """
    at_once = [p.flops / t for p, t in timed.items()]
    share = [1 - (launch + p.bytes / memory) / t for p, t in timed.items()]
    inverse = sum(a * b for a, b in zip(at_once, share, strict=True))
    if inverse <= 0:
        sizes = " ".join(f"{p.m}x{p.n}x{p.k}" for p in timed)
        raise ConfigError("--shapes", sizes, "larger products: these take as long as their bytes")
    return sum(a * a for a in at_once) / inverse


def calibrate(
    bench: Bench,
    shapes: Sequence[tuple[int, int, int]],
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
    speed = fit_speed(timed, cached or memory, launch if cuda else 0)
    peak = max(speed, *(p.flops / t for p, t in timed.items()))
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
            f"{p.m} x {p.n} x {p.k}",
            f"{1e6 * t:.0f}",
            f"{p.flops / t / 1e12:.4f}",
            f"{product_seconds(Work(Counter({p: 1})), machine) / t:.2f}",
        ]
        for p, t in timed.items()
    ]
    return machine, rows


def _cpu_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def as_toml(machine: Hardware) -> str:
    """Return the text of a hardware file."""
    lines = ["# Written by scripts/check/calibrate.py; for scripts/estimate.py --hardware"]
    for field in fields(Hardware):
        value = getattr(machine, field.name)
        if field.name == "product_gbytes_per_s" and not value:
            continue  # the memory's
        if isinstance(value, float):
            value = float(f"{value:.5g}")
        lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


@dataclass
class SmallStep:
    """A small model whose step is both estimated and measured.

    Args:
        family: Its family.
        dim: Its width.
        batch: Sequences.
        seq_len: Tokens per sequence.
        layers: Number of blocks.
    """

    family: str
    dim: int
    batch: int
    seq_len: int
    layers: int = 2

    @property
    def name(self) -> str:
        """What a table calls it."""
        tokens = f"{self.batch} x {self.seq_len} tokens"
        return f"{self.family}, width {self.dim}, {self.layers} layers, {tokens}"

    def __post_init__(self) -> None:
        family = FAMILIES[self.family]
        rank = self.dim // 4 if family.low_rank else 0
        self.args = LlamaArgs(
            dim=self.dim,
            n_layers=self.layers,
            n_heads=self.dim // 64,
            n_kv_heads=self.dim // 64,
            ffn_dim=self.dim * 8 // 3 // 8 * 8,
            vocab_size=2048,
            max_seq_len=self.seq_len,
            family=self.family,
            activation=family.defaults("350M")["activation"],
            rank_attention=rank,
            rank_ffn=rank,
        )
        self._work: Work | None = None

    def estimate(self, machine: Hardware, bench: Bench) -> float:
        """Return the modelled seconds of a step, where RMSNorm is one kernel on GPUs only."""
        if self._work is None:
            cuda = bench.device.type == "cuda"
            shape = Workload(self.args, TPSettings(), 1, self.batch, self.seq_len, bench.dtype)
            recorded = rehearse_work(shape, fused=False, one_kernel_norm=cuda)
            self._work = Work()
            for block, ends in zip(recorded.block, recorded.ends, strict=True):
                self._work = self._work.plus(block, self.args.n_layers).plus(ends)
        seconds = product_seconds(self._work, machine) + element_wise_seconds(self._work, machine)
        stored = count_parameters(self.args).total * bench.dtype.itemsize
        return seconds + moved_seconds(ADAMW_PASSES * stored, machine)

    def step(self, bench: Bench) -> Callable[[], None]:
        """Return a function that trains one step."""
        model = LlamaModel(self.args).to(device=bench.device, dtype=bench.dtype)
        model.init_weights()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(2048, (self.batch, self.seq_len), device=bench.device)

        def step() -> None:
            model(tokens, targets=tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()
        return step


def compare_steps(
    bench: Bench, shapes: Sequence[tuple[int, int, int]], cases: Sequence[SmallStep], rounds: int
) -> list[list[str]]:
    """Return rows of steps: model, estimated and measured milliseconds, ratio and its range.

    Every round calibrates the machine and measures each step once, so that both see the same load.
    """
    steps = [case.step(bench) for case in cases]
    ratios: list[list[float]] = [[] for _ in cases]
    last: list[tuple[float, float]] = []
    for _ in range(rounds):
        machine, _ = calibrate(bench, shapes, cases[0].seq_len)
        last = []
        for case, step, found in zip(cases, steps, ratios, strict=True):
            pair = case.estimate(machine, bench), bench.seconds(step)
            found.append(pair[0] / pair[1])
            last.append(pair)
    return [
        [
            case.name,
            *(f"{1e3 * seconds:.1f}" for seconds in pair),
            f"{median(found):.2f}",
            f"{min(found):.2f} to {max(found):.2f}",
        ]
        for case, pair, found in zip(cases, last, ratios, strict=True)
    ]
