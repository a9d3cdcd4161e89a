# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a step grows with width, depth, sequence length and ranks, beside the estimator's line.

A point is a small CoLA model under BTP, whose step runs on gloo ranks of this machine.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scripts.bench.calibration import Bench, calibrate
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.estimate.kernels import Product, Work
from torchtitan_lr.estimate.rehearsal import Workload, rehearse
from torchtitan_lr.estimate.step_time import (
    Hardware,
    element_wise_seconds,
    moved_seconds,
    product_seconds,
)
from torchtitan_lr.estimate.timing import ADAMW_PASSES
from torchtitan_lr.estimate.traffic import bytes_by_dim
from torchtitan_lr.estimate.work import rehearse_work
from torchtitan_lr.formulas.communication import model_traffic
from torchtitan_lr.ledger.ledger import CommLedger, mesh_dims_of
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.tensor.tensor_parallel import (
    TPSettings,
    apply_tensor_parallel,
    resolve_settings,
)
from torchtitan_lr.training.figures import new_figure

STATES = 4
"""Tensors of a parameter's size after a step: weight, gradient and AdamW's two moments."""

QUANTITIES = {"seconds": "CPU ms per step", "memory": "MiB", "bytes": "MB sent"}
"""What is measured of every point, with the axis of its picture."""

_SCALES = {"seconds": 1e3, "memory": 2**-20, "bytes": 1e-6}


@dataclass(frozen=True)
class Point:
    """A step to measure.

    Args:
        factor: What grows: ``width``, ``layers``, ``length`` or ``ranks``.
        width: Width d of the model; latents are a quarter of it.
        layers: Decoder blocks.
        length: Tokens of a sequence.
        ranks: Tensor-parallel ranks T.
        batch: Sequences.
    """

    factor: str
    width: int = 256
    layers: int = 2
    length: int = 128
    ranks: int = 2
    batch: int = 4

    @property
    def size(self) -> int:
        """The value of the factor."""
        return int(getattr(self, self.factor))

    def workload(self) -> Workload:
        """Return the model, its plan and its batch, in fp32."""
        args = LlamaArgs(
            dim=self.width,
            n_layers=self.layers,
            n_heads=self.width // 32,  # 8 ranks divide them
            n_kv_heads=self.width // 32,
            ffn_dim=self.width * 8 // 3 // 64 * 64,
            vocab_size=2048,
            max_seq_len=self.length,
            family="cola",
            rank_attention=self.width // 4,
            rank_ffn=self.width // 4,
        )
        settings = resolve_settings(TPSettings("btp"), args, self.ranks, self.length)
        return Workload(args, settings, self.ranks, self.batch, self.length, torch.float32)


@dataclass(frozen=True)
class Links:
    """What it costs a rank in CPU time that a step is split over gloo ranks of one machine.

    Args:
        call: Seconds of a collective beyond its bytes, with what surrounds it in a step: DTensors
            are unwrapped, autograd calls Python, gloo's threads wake up.
        byte: Seconds of a byte of its message.
    """

    call: float = 0.0
    byte: float = 0.0


def measure_machine(
    pool: RankPool, bench: Bench, shapes: Sequence[tuple[int, int, int]], length: int
) -> Hardware:
    """Calibrate the kernels of ranks that all run at once: they share caches and memory.

    Three times, the first of which is often slower.

    Args:
        pool: The ranks.
        bench: How kernels are timed.
        shapes: Products (m, n, k) to time.
        length: Sequence length of the attention to time.

    Returns:
        A machine with the median of every constant; its links are not measured.
    """
    found = [machine for _ in range(3) for machine in pool.run(_machine, bench, shapes, length)]
    # In a sum of products' times, a speed and the bandwidth of the same fit belong together.
    found.sort(key=lambda machine: product_seconds(_every(shapes), machine))
    middle: Hardware = found[len(found) // 2]
    others = ("memory_gbytes_per_s", "kernel_us")
    return replace(middle, **{key: median(getattr(m, key) for m in found) for key in others})


def _every(shapes: Sequence[tuple[int, int, int]]) -> Work:
    return Work(Counter(Product(1, *shape, 4) for shape in shapes))


def _machine(bench: Bench, shapes: Sequence[tuple[int, int, int]], length: int) -> Hardware:
    dist.barrier()
    return calibrate(bench, shapes, length, links=(1.0, 1.0))[0]


BARE = Point("layers", length=8, batch=1)
"""A step with hardly any work: eight tokens. Its time is what surrounds its kernels."""


def measure_links(
    pool: RankPool, ranks: int, machine: Hardware, repeats: int, size: int = 2**20
) -> Links:
    """Measure what collectives cost a rank: call it outside a process group.

    An all-reduce alone shows what its bytes cost. What a call costs is seen in a step with hardly
    any work, its kernels as estimated subtracted: around an all-reduce that is repeated alone,
    caches are warm and gloo's threads awake.

    Args:
        pool: The ranks.
        ranks: How many.
        machine: The calibrated machine, its links aside.
        repeats: Timed rounds of collectives; three times as many steps.
        size: Bytes of a large message.
    """
    tiny, large = (median(pool.run(_reduced, n, repeats)) for n in (8, size))
    byte = max(0.0, large - tiny) / size
    point = replace(BARE, ranks=ranks)
    (found,) = measure({ranks: pool}, [point], 3 * repeats)
    known = estimate_point(point, machine, Links(byte=byte))["seconds"]
    return Links(max(0.0, median(found["seconds"]) - known) / messages(point)[0], byte)


def _reduced(size: int, repeats: int, times: int = 10) -> float:
    """Return the median CPU seconds of an all-reduce, threads of gloo included."""
    x, found = torch.zeros(size // 4), []
    for _ in range(repeats + 1):
        begin = time.process_time()
        for _ in range(times):
            dist.all_reduce(x)
        found.append((time.process_time() - begin) / times)
    return median(found[1:])


def estimate_point(point: Point, machine: Hardware, links: Links) -> dict[str, float]:
    """Return what the estimator says of a step; call it outside a process group.

    Args:
        point: The step.
        machine: The calibrated machine, its links aside.
        links: Those between the ranks.

    Returns:
        ``seconds`` of products, other kernels, AdamW and collectives of a rank, ``memory`` in bytes
        and ``bytes`` sent.
    """
    shape = point.workload()
    recorded = rehearse_work(shape, fused=False, one_kernel_norm=False)
    work = Work()
    for block, ends in zip(recorded.block, recorded.ends, strict=True):
        work = work.plus(block, point.layers).plus(ends)
    stored = 4 * _parameters_of_a_rank(shape)
    seconds = product_seconds(work, machine) + element_wise_seconds(work, machine)
    kept = rehearse(shape)
    calls, sent = messages(point)
    seconds += calls * links.call + sent * links.byte
    return {
        "seconds": seconds + moved_seconds(ADAMW_PASSES * stored, machine),
        "memory": kept.block * point.layers + kept.ends + STATES * stored,
        "bytes": float(sent),
    }


def messages(point: Point) -> tuple[int, int]:
    """Return the collectives of a step and their bytes, by the plan's formula."""
    shape = point.workload()
    rows = model_traffic(shape.args, shape.settings, point.ranks, point.batch * point.length)
    dims = bytes_by_dim(rows, defaultdict(lambda: "float32"))
    return sum(row.calls for row in rows), sum(sum(ops.values()) for ops in dims.values())


def measure(
    pools: dict[int, RankPool], points: Sequence[Point], rounds: int
) -> list[dict[str, Any]]:
    """Measure steps in turns, each on ranks of its own pool.

    Args:
        pools: By number of ranks.
        points: The steps.
        rounds: Timed steps of each.

    Returns:
        By point ``seconds`` (a list: the mean of the ranks' CPU times per round), ``memory`` and
        ``bytes`` of rank 0.
    """
    for point in points:
        pools[point.ranks].run(_build, point)
    times: list[list[float]] = [[] for _ in points]
    for _ in range(rounds):
        for point, found in zip(points, times, strict=True):
            seconds = pools[point.ranks].run(_timed_step, point)
            found.append(sum(seconds) / len(seconds))
    counted = [pools[point.ranks].run(_counted_step, point)[0] for point in points]
    return [{"seconds": t, **rest} for t, rest in zip(times, counted, strict=True)]


_STEPS: dict[Point, "RankStep"] = {}
"""The models of this rank."""


class RankStep:
    """A model of one rank with its optimizer and batch.

    Args:
        point: The step.
    """

    def __init__(self, point: Point) -> None:
        shape = point.workload()
        self.mesh = init_device_mesh("cpu", (point.ranks,), mesh_dim_names=("tp",))
        with torch.device("meta"):
            self.model = LlamaModel(shape.args)
        if point.ranks > 1:
            apply_tensor_parallel(self.model, self.mesh, shape.settings)
        self.model.to_empty(device="cpu")
        self.model.init_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(2048, (point.batch, point.length), generator=generator)

    def forward(self) -> Tensor:
        """Return the loss of the batch."""
        loss: Tensor = self.model(self.tokens, targets=self.tokens)
        return loss

    def run(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


def _build(point: Point) -> None:
    _STEPS[point] = RankStep(point)
    _STEPS[point].run()


def _timed_step(point: Point) -> float:
    step = _STEPS[point]
    dist.barrier()
    begin = time.process_time()
    step.run()
    return time.process_time() - begin


def _counted_step(point: Point) -> dict[str, float]:
    step = _STEPS[point]
    with CommLedger([step.model], mesh_dims_of({"tp": step.mesh})) as ledger:
        step.run()
    state = [x for values in step.optimizer.state.values() for x in values.values()]
    held = [*step.model.parameters(), *(p.grad for p in step.model.parameters()), *state]
    stored = sum(local_part(x).nbytes for x in held if x is not None and x.dim() > 0)
    return {
        "memory": stored + _saved_bytes(step),
        "bytes": sum(row["bytes"] for row in ledger.rows() if row["mesh_dim"] == "tp"),
    }


def _saved_bytes(step: RankStep) -> int:
    """Return what forward and the loss keep for backward, weights aside."""
    outside = {local_part(p).untyped_storage().data_ptr() for p in step.model.parameters()}
    outside |= {b.untyped_storage().data_ptr() for b in (*step.model.buffers(), step.tokens)}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = local_part(x).untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step.forward()
    return sum(size for address, size in saved.items() if address not in outside)


def _parameters_of_a_rank(shape: Workload) -> int:
    """Return a rank's parameters; BTP splits all of them but the norms' by T."""
    with torch.device("meta"):
        model: nn.Module = LlamaModel(shape.args)
    return sum(p.numel() for p in model.parameters()) // shape.tp_degree


def table(report: dict[str, Any], line: Callable[[list[str]], Any]) -> None:
    """Pass the cells of every point to ``line``: measured and estimated, and their ratio."""
    for factor, rows in report.items():
        for row in rows:
            cells = [f"{factor} {row['size']}"]
            for name, scale in _SCALES.items():
                found = row["measured"][name]
                spread = ""
                if isinstance(found, list):
                    spread = f" ({scale * min(found):.1f}-{scale * max(found):.1f})"
                    found = median(found)
                expected = row["estimated"][name]
                ratio = f"{expected / found:.2f}" if found else "-"
                cells += [f"{scale * found:.2f}{spread}", f"{scale * expected:.2f}", ratio]
            line(cells)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw every factor as a row of three pictures: points measured, lines estimated."""
    figure = new_figure(7.4, 2.0 * len(report) + 0.8)
    axes = figure.subplots(len(report), len(_SCALES), squeeze=False)
    for (factor, rows), row_axes in zip(report.items(), axes, strict=True):
        sizes = [row["size"] for row in rows]
        for (name, scale), axis in zip(_SCALES.items(), row_axes, strict=True):
            expected = [scale * row["estimated"][name] for row in rows]
            axis.plot(sizes, expected, color="tab:blue")
            for size, row in zip(sizes, rows, strict=True):
                found = row["measured"][name]
                values = [scale * x for x in (found if isinstance(found, list) else [found])]
                axis.plot([size] * len(values), values, ".", color="tab:orange")
            axis.set_xlabel(factor)
            axis.set_ylabel(QUANTITIES[name])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color="tab:blue", label="estimated"),
        Line2D([], [], color="tab:orange", ls="none", marker=".", label="measured, each run"),
    ]
    figure.suptitle("a step of llama_cola on CPU ranks", fontsize=10)
    figure.set_layout_engine("constrained")
    figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
