#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write docs/estimator.md: estimated step times next to published ones.

    python scripts/papers/estimator_table.py          # writes the page
    python scripts/papers/estimator_table.py --print  # shows it, writes nothing

Every published run is estimated as scripts/estimate.py does, with the constants of
scripts/hardware. The estimates follow the code that trains: after a change of the model, the plans
or the checkpointing, write the page again.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from torchtitan_lr.estimate.hardware import load_hardware
from torchtitan_lr.estimate.kernels import Product, Work
from torchtitan_lr.estimate.run import Run, read_run
from torchtitan_lr.estimate.step_time import (
    Hardware,
    MeshDim,
    StepTime,
    collective_seconds,
    product_seconds,
)
from torchtitan_lr.estimate.timing import step_time
from torchtitan_lr.estimate.traffic import step_traffic
from torchtitan_lr.estimate.work import work_of_run
from torchtitan_lr.formulas.papers import published as paper
from torchtitan_lr.formulas.traffic import Traffic
from torchtitan_lr.tools.cli import OneLineParser, markdown_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "estimator.md"
CONFIGS = ROOT / "train_configs"
HARDWARE = ROOT / "scripts" / "hardware"
A100, H100, H100_700W = "a100_80g_perlmutter", "h100_500w", "h100"
PLANS = ("full", "vanilla_replicated", "btp")
BOUND = 1.25
"""An estimate may differ from what is published by this factor."""


@dataclass(frozen=True)
class Published:
    """A published step.

    Args:
        table: Where it is published.
        size: The model's size: what a leave-one-out check leaves out.
        name: What the run is, beyond its size.
        seconds: Published seconds per step.
        hardware: File of the machine.
        arguments: Arguments of the run.
        ranks: Its GPUs.
    """

    table: str
    size: str
    name: str
    seconds: float
    hardware: str
    arguments: tuple[str, ...]
    ranks: int


def boost_runs() -> Iterator[Published]:
    """Yield the bars of BOOST's Figure 6 (left), and what the authors' repository logs."""
    for row in paper.BOOST_ITERATION_SECONDS:
        bars = (row.full, row.vanilla, row.boost)
        for plan, seconds in zip(PLANS, bars, strict=True):
            yield _boost("BOOST, Figure 6", row, plan, seconds, 4, "bfloat16")
    rows = {row.flavor: row for row in paper.BOOST_ITERATION_SECONDS}
    for (flavor, batch), logged in paper.BOOST_LOGGED_SECONDS.items():
        for plan, found in zip(PLANS, logged, strict=True):
            if found is not None:
                yield _boost("BOOST, logs", rows[flavor], plan, found, batch, "float32")


def _boost(
    table: str, row: paper.BoostRun, plan: str, seconds: float, batch: int, dtype: str
) -> Published:
    family = "llama_full" if plan == "full" else "llama_cola"
    arguments = (
        f"--job.config_file={CONFIGS / 'boost_3b.toml'}",
        f"--model.name={family}",
        f"--model.flavor={row.flavor}",
        *(f"--training.{size}_batch_size={batch}" for size in ("local", "global")),
        *("--training.seq_len=4096", f"--training.dtype={dtype}", "--compile.no_enable"),
        "--activation_checkpoint.mode=none",
        f"--parallelism.tensor_parallel_degree={row.tensor_parallel}",
        f"--parallelism.tp_plan={'auto' if plan == 'full' else plan}",
        f"--parallelism.pipeline_parallel_degree={row.pipeline_parallel}",
        # One micro-batch goes through both stages in turn. Torch's schedules refuse this.
        f"--parallelism.pipeline_parallel_microbatch_size={batch}",
    )
    size = row.flavor.removesuffix("_boost")
    name = f"{plan}, b = {batch}, T = {row.tensor_parallel}, PP = {row.pipeline_parallel}"
    return Published(table, size, name, seconds, A100, arguments, row.ranks)


def torchtitan_runs() -> Iterator[Published]:
    """Yield torchtitan's own benchmark of Llama 3.1 8B under FSDP."""
    for (ranks, compiled), rate in paper.TORCHTITAN_8B.items():
        arguments = (
            f"--job.config_file={CONFIGS / 'full_8b_gqa.toml'}",
            *("--training.local_batch_size=2", "--training.global_batch_size=-1"),
            *("--training.seq_len=8192", f"--compile.{'' if compiled else 'no_'}enable"),
            *("--activation_checkpoint.mode=selective",),
            "--activation_checkpoint.selective_ac_option=op",
        )
        name = f"{ranks} GPUs, {'compiled' if compiled else 'eager'}"
        yield Published("torchtitan", "8B", name, 2 * 8192 / rate, H100, arguments, ranks)


def cola_runs() -> Iterator[Published]:
    """Yield CoLA's Table 9, runs of Hugging Face models without a compiler."""
    modes = {"full": "none", "GCP": "full", "CoLA": "none", "CoLA-M": "low_rank"}
    for name, (rate, _) in paper.COLA_H100_1B.items():
        config = "cola_1b" if "CoLA" in name else "full_1b"
        arguments = (
            f"--job.config_file={CONFIGS / config}.toml",
            *("--training.local_batch_size=64", "--training.global_batch_size=64"),
            *("--training.dtype=bfloat16", "--compile.no_enable"),
            f"--activation_checkpoint.mode={modes[name]}",
        )
        yield Published("CoLA, Table 9", "1B", name, 64 * 256 / rate, H100_700W, arguments, 1)


@cache
def run_of(case: Published) -> Run:
    """Return the run that is estimated."""
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.config.build import build_job_config

    return read_run(build_job_config(list(case.arguments)), case.ranks)


def estimate(case: Published, hardware: Hardware | None = None) -> StepTime:
    """Return the estimate of a published run, on another machine if one is given."""
    run = run_of(case)
    machine = load_hardware(case.hardware, HARDWARE) if hardware is None else hardware
    traffic = [step_traffic(run, pp_rank) for pp_rank in range(run.pp)]
    return step_time(run, traffic, machine, work_of_run(run))


def ratio(case: Published) -> float:
    """Return estimated over published seconds."""
    return estimate(case).total / case.seconds


def in_order(cases: Sequence[Published], slack: float = 0.06) -> bool:
    """Return whether estimates sort as what is published; closer than ``slack`` is a tie."""
    found = [(case.seconds, estimate(case).total) for case in cases]
    return all(a[1] < b[1] for a in found for b in found if a[0] * (1 + slack) < b[0])


SLOWER: dict[str, Callable[[Hardware], Hardware]] = {
    "products": lambda h: replace(h, peak_tflops=h.peak_tflops / 2),
    "memory and launches": lambda h: replace(
        h, memory_gbytes_per_s=h.memory_gbytes_per_s / 2, kernel_us=2 * h.kernel_us
    ),
    "links": lambda h: replace(
        h,
        intra_node_gbytes_per_s=h.intra_node_gbytes_per_s / 2,
        inter_node_gbytes_per_s=h.inter_node_gbytes_per_s / 2,
        latency_us=2 * h.latency_us,
    ),
}
"""A machine on which one part of a step takes twice as long."""


def parts(case: Published) -> list[float]:
    """Return the seconds of an estimate that each part of the machine takes."""
    machine = load_hardware(case.hardware, HARDWARE)
    whole = estimate(case).total
    return [estimate(case, slow(machine)).total - whole for slow in SLOWER.values()]


def left_out(cases: Sequence[Published]) -> dict[str, tuple[list[float], list[float]]]:
    """Fit a factor for every part of the machine to all sizes but one, and predict that one.

    Returns:
        By size left out: the factors, and predicted over published seconds of its cases.
    """
    shares = torch.tensor([[p / c.seconds for p in parts(c)] for c in cases], dtype=torch.float64)
    result = {}
    for size in dict.fromkeys(case.size for case in cases):
        mine = torch.tensor([case.size == size for case in cases])
        rest = shares[~mine]
        factors = torch.linalg.lstsq(rest, torch.ones(len(rest), 1, dtype=rest.dtype)).solution
        result[size] = factors.flatten().tolist(), (shares[mine] @ factors).flatten().tolist()
    return result


def linear_ratios() -> list[float]:
    """Return modelled over measured seconds of the linears that BOOST's authors timed."""
    machine, found = load_hardware(A100, HARDWARE), []
    measured = {key: [ms * 1e-3 for ms in row] for key, row in paper.BOOST_LINEAR_MS.items()}
    cases = [*measured, *(("7B", batch) for batch in paper.BOOST_LINEAR_UTILIZATION)]
    for flavor, batch in cases:
        for i, products in enumerate(_timed_products(flavor, batch)):
            work = Work()
            for product in products:
                work.products[product] += 1
            if (flavor, batch) in measured:
                seconds = measured[flavor, batch][i]
            else:
                used = paper.BOOST_LINEAR_UTILIZATION[batch][i] / 100
                seconds = sum(p.flops for p in products) / (used * machine.peak_tflops * 1e12)
            found.append(product_seconds(work, machine) / seconds)
    return found


def _timed_products(flavor: str, batch: int, t: int = 4) -> list[list[Product]]:
    """Products of the six timed linears on one of T ranks."""
    _, _, d, f, r = paper.BOOST_SHAPES[flavor]
    m = batch * 4096

    def chain(*widths: int) -> list[Product]:
        return [Product(1, m, n, k, 2) for k, n in pairwise(widths)]

    full = [chain(d, d // t), chain(d, f // t)]
    vanilla = [chain(d, r // t), chain(r // t, d)], [chain(d, r // t), chain(r // t, f)]
    boost = [chain(d // t, r, d // t), chain(d // t, r, f // t)]
    return [*full, *(first + second for first, second in vanilla), *boost]


def all_reduce_ratios() -> list[float]:
    """Return modelled over measured seconds of the all-reduces that BOOST's authors timed."""
    machine = load_hardware(A100, HARDWARE)
    found = []
    for bars in paper.BOOST_ALL_REDUCES.values():
        for calls, (mib, ms) in zip((2, 7, 7), bars, strict=True):
            row = Traffic("block", "forward", "all_reduce", "activation", calls, mib * 2**19, "tp")
            found.append(collective_seconds(row, 2, MeshDim(4, 1), machine) / (ms * 1e-3))
    return found


INTRODUCTION = """\
# The estimator against published steps

`python scripts/papers/estimator_table.py` writes this page, and a unit test checks that it is up to
date. Each published run is estimated as `scripts/estimate.py` does: its blocks run on tensors
without data, and every product, every element-wise kernel and every collective is counted. The
machine is described by a few constants in `scripts/hardware/`. "Others" are the kernels that are
neither products nor attention.

The model: a product takes its FLOPs over `peak_tflops × matmul_efficiency`, plus its bytes over
`memory_gbytes_per_s`, plus `kernel_us`. Attention takes its FLOPs below the diagonal over
`attention_share` of that speed. Other kernels take their bytes over the bandwidth, plus
`kernel_us`; with `compile.enable` those of a block between two products are one kernel. The head
computes its loss a chunk of tokens at a time, and is not compiled. A collective takes
`latency_us` per call plus its bytes over the link. FSDP's collectives are hidden behind
computation as far as it lasts, tensor-parallel ones are exposed. AdamW passes ten times over what a
rank stores.
"""


BOOST = """\
## BOOST on A100s

bf16, sequences of 4096 tokens, eager, no checkpointing. The bars of Figure 6 are pure bf16; the
logs have fp32 gradients and master weights. At T = 1 vanilla and BTP are the same computation here.
With PP = 2 one micro-batch passes both stages in turn, so that each waits for the other.
"""

TORCHTITAN = """\
## torchtitan on H100s

Llama 3.1 8B under FSDP, 2 sequences of 8192 tokens per GPU, H100s limited to 500 W. The efficiency
of products is fitted to the first row; the other three rows are predictions.
"""

COLA = """\
## Shown, not fitted: CoLA's Table 9

Hugging Face models on one H100, 64 sequences of 256 tokens, estimated as if our eager code ran. The
published runs take much longer than their kernels should. What else they spend time on is not
published.
"""

PARTS = """\
## Parts

- {} linears timed by BOOST's authors, thin ones included: modelled over measured {:.2f} to {:.2f}.
- {} all-reduces timed by them: {:.2f} to {:.2f}.
"""

LEFT_OUT = """\
## One size left out

For each size of Figure 6, three factors (of products, of memory and launches, of links) are fitted
by least squares to the other sizes, and the size is predicted with them. If the constants fitted
single sizes, the predictions would be bad.
"""


def page() -> str:
    """Return the whole page."""
    boost = list(boost_runs())
    figure = [case for case in boost if case.table == "BOOST, Figure 6"]
    linears, reduces = linear_ratios(), all_reduce_ratios()
    ranges = [x for found in (linears, reduces) for x in (len(found), min(found), max(found))]
    sections = [
        INTRODUCTION,
        "## Constants\n",
        _constants(),
        BOOST,
        _table(boost),
        TORCHTITAN,
        _table(list(torchtitan_runs())),
        COLA,
        _table(list(cola_runs())),
        PARTS.format(*ranges),
        LEFT_OUT,
        _left_out_table(figure),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _constants() -> str:
    hidden = ("name", "memory_gib", "product_gbytes_per_s")
    names = [f.name for f in fields(Hardware) if f.name not in hidden]
    machines = [load_hardware(stem, HARDWARE) for stem in (A100, H100)]
    comments = [_comments(HARDWARE / f"{stem}.toml") for stem in (A100, H100)]
    rows = []
    for name in names:
        cells = [f"`{name}`"]
        for machine, comment in zip(machines, comments, strict=True):
            value = getattr(machine, name)
            cells += [str(value).lower() if isinstance(value, bool) else f"{value:g}"]
            cells += [comment.get(name, "")]
        rows.append(cells)
    return markdown_table(["key", A100, "from", H100, "from"], rows) + "\n"


def _comments(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if " = " in line]
    return {line.split(" = ")[0]: line.partition("  # ")[2] for line in lines}


def _table(cases: Sequence[Published]) -> str:
    rows = []
    for case in cases:
        time = estimate(case)
        rows.append(
            [
                f"{case.size} {case.name}" + (" (log)" if case.table == "BOOST, logs" else ""),
                *(f"{x:.3f}" for x in (time.total, case.seconds)),
                f"{time.total / case.seconds:.2f}",
                *(f"{x:.3f}" for x in (time.compute, time.element_wise, time.optimizer)),
                *(f"{x:.3f}" for x in (time.exposed_communication, time.bubble)),
            ]
        )
    head = ["run", "estimate, s", "published, s", "ratio"]
    head += ["products", "others", "optimizer", "exposed", "bubble"]
    return markdown_table(head, rows) + "\n"


def _left_out_table(cases: Sequence[Published]) -> str:
    rows = [
        [size, *(f"{x:.2f}" for x in factors), ", ".join(f"{x:.2f}" for x in ratios)]
        for size, (factors, ratios) in left_out(cases).items()
    ]
    return markdown_table(["left out", *SLOWER, "predicted ÷ published"], rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or print the page."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="show the page, write nothing")
    options: Any = parser.parse_args(argv)
    text = page()
    if options.print:
        print(text, end="")
    else:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
