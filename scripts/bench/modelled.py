# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Modelled beside measured times of one GPU, for every row of docs/data/h100.json and h200.json.

    python -m scripts.bench.modelled           # every row that was timed
    python -m scripts.bench.modelled --steps   # CoLA's and full rank's steps: kernels, bytes, MFU
    python -m scripts.bench.modelled --remedies   # a step before and after each remedy

Rows are modelled as the code was that ran: without captured passes before there were any, and odd
widths unpadded. Kernels are counted on tensors without data, as `estimate` does; "calls" in
docs/data are kernels and calls of CUDA's API together. A model differs from its row by at most
`BOUND`, or the row has a reason.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import nn
from torch._functorch import config as functorch_config

import torchtitan_lr.training.register  # noqa: F401
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.costs.described_run import Run, elements, read_run
from torchtitan_lr.costs.gram_messages import RULES
from torchtitan_lr.costs.hardware import Hardware, load_hardware
from torchtitan_lr.costs.kernels import Work
from torchtitan_lr.costs.memory import with_kept_inputs
from torchtitan_lr.costs.rehearsal import Workload, rehearse, rehearse_run
from torchtitan_lr.costs.step_time import (
    kernel_seconds,
    optimizer_seconds,
    product_seconds,
    step_time,
)
from torchtitan_lr.costs.step_traffic import step_traffic
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.ends import errors_in_place
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.checkpoint_modes import apply_activation_checkpoint
from torchtitan_lr.parallel.parallelize import apply_compile
from torchtitan_lr.parallel.plan_parts import TPSettings

ROOT = Path(__file__).resolve().parents[2]
BOUND = 0.15

SLOW_HOST = 3600.0
HOST_UNIT_US = {"start": SLOW_HOST, "run_cola_1b": SLOW_HOST, "block": 3750.0, "graphs": 2000.0}
HOST_UNIT_US |= {"block_by_batch": 6700.0, "short": 2900.0}
"""Microseconds per unit of hosts with few free cores, one number fitted to a part's rows; those of
other parts are device times."""

UNALIGNED_TFLOPS = 120.0
"""Speed of products of an odd width: of 48 in a profile 138, of all in eager steps about 115."""

NOT_MODELLED = {
    "parity": "errors", "equal": "losses", "tests": "tests", "tests_second_day": "tests",
    "run_debug_cola": "losses", "run_debug_tsr": "losses", "run_debug_caat": "losses",
    "runs": "losses", "decoding": "no training step", "codec": "the host codes and selects",
    "products": "single products, from which the constants are", "eigenvectors": "refreshes",
    "context": "attention with a mask, at half the speed of one without",
}  # fmt: skip
"""Parts of docs/data without a row that the model has a time for."""

HOST = "the host: few cores beside other processes, and FSDP2's older passes"
SMALL = "the optimizer's kernels on r x r matrices but products are not counted"
REASONS = {
    ("h100 run_cola_1b", "cola_1b"): HOST,
    ("h200 run_muon_1b_second_day", "muon_1b"): HOST,
    ("h200 run_spectron_1b", "spectron_1b"): HOST,
    ("h200 run_spectron_1b_second_day", "spectron_1b"): HOST,
    ("h200 spectral", "Muon"): SMALL,
    ("h200 spectral_second_day", "Spectron"): SMALL,
    ("h200 short", "Spectron, captured"): SMALL,
}
"""Why a row differs by more than `BOUND`, by its part and name."""


@dataclass(frozen=True)
class Case:
    """A measured row, and what is modelled for it."""

    name: str
    ms: float
    arguments: tuple[str, ...]  # of the configuration
    how: str = "step"  # or ``block``, ``optimizer``, ``factors``
    odd: float = 0.0  # share of the products of an odd width that ran unpadded
    world: int = 1


def _rows(batch: int, tokens: int) -> tuple[str, ...]:
    sizes = [f"--training.{kind}_batch_size={batch}" for kind in ("local", "global")]
    return *sizes, f"--training.seq_len={tokens}"


PURE = "--training.dtype=bfloat16"  # of a benchmark without a trainer
OFF, ON = "--training.step_graph=off", "--training.step_graph=auto"
EAGER = "--compile.no_enable"
BOOST = "--model.flavor=1B_boost"
FP32 = "--training.mixed_precision_param=float32"  # so are then the optimizer's products
SHAPES = {"start": (32, 256), "ratio": (8, 1024), "wide": (24, 1024), "short": (2, 1024)}
ALONE = "--parallelism.data_parallel_replicate_degree=1"
Arguments = tuple[str, ...]


def cases(part: str, content: dict[str, Any]) -> Iterator[Case]:
    """Yield the timed rows of a part."""
    command = content.get("command", "")
    arguments: Arguments
    if part.startswith("run_"):
        text = re.sub(r"--training.dataset=\S+", "", command.split(";")[0])
        arguments = (*shlex.split(text.partition(" train ")[2]), OFF)
        ms = 1e3 * median(r["seconds_per_step"] for r in content["rows"] if r["step"] >= 5)
        yield Case(arguments[0], ms, arguments, odd=2 / 9 * (part == "run_cola_1b"))
        return
    for row in content["rows"]:
        if "share" in row:  # a kernel
            continue
        if part in ("training", "padded", "profile"):
            yield _of_odd_width(row)
        elif part in ("peers", "graphs"):
            family, batch = row.get("model") or row["family"], row.get("batch", 8)
            how = EAGER if "--modes eager" in command else ON if row.get("graphs") else OFF
            if family in ("full", "cola"):
                arguments = f"{family}_1b", BOOST, *_rows(batch, 1024), PURE, OFF, how
                yield Case(f"{family}, {batch} rows, {how[2:]}", row["ms"], arguments)
        elif part in SHAPES and "ms" in row:
            family, _, kind = row["row"].partition(", ")
            config = {"AdamW": "cola"}.get(family, family.lower()) + "_1b"
            arguments = config, BOOST, *_rows(*SHAPES[part]), OFF if kind == "eager" else ON
            yield Case(row["row"], row["ms"], arguments)
        elif part in ("block", "block_by_batch"):
            yield _of_block(row)
        elif row.get("optimizer") in ("AdamW", "TSR-Adam") and part.startswith("optimizer"):
            config = "full_1b" if row["optimizer"] == "AdamW" else "tsr_1b"
            yield Case(row["optimizer"], row["ms"], (config, ALONE), "optimizer")
        elif row.get("optimizer") in ("AdamW", "Muon", "Spectron", "LoRAMuon"):
            arguments = "cola_1b", BOOST, f"--optimizer.name={row['optimizer']}", FP32
            yield Case(row["optimizer"], row["ms"], arguments, "factors")


def _of_odd_width(row: dict[str, Any]) -> Case:
    family, mode = row.get("family", "cola"), row.get("mode", "compiled")
    # A compiler pads all products of full rank, and of CoLA's nine in a block all but two.
    odd = 1.0 if mode == "eager" else 2 / 9 if family == "cola" else 0.0
    odd *= row.get("how") != "padded True"
    checkpointing, batch = row.get("checkpointing", "none"), row.get("tokens", 8192) // 1024
    arguments: Arguments = (f"{family}_1b", *_rows(batch, 1024), PURE, OFF)
    arguments += (f"--activation_checkpoint.mode={checkpointing}", *[EAGER] * (mode == "eager"))
    name = f"{family}, {batch} rows, {row.get('how', mode)}, checkpointing {checkpointing}"
    return Case(name, row["ms"], arguments, odd=odd)


def _of_block(row: dict[str, Any]) -> Case:
    variant, batch = row["variant"], row.get("batch", 1)
    plan, checkpoints, _ = variant.partition("_low_rank")
    config = "full_1b" if plan == "full" else "cola_7b"
    arguments: Arguments = (config, "--model.flavor=7B", OFF)
    arguments += (f"--parallelism.tp_plan={'auto' if plan == 'full' else plan}",)
    arguments += (f"--activation_checkpoint.mode={'low_rank' if checkpoints else 'none'}",)
    arguments += (*_rows(batch, 4096), "--parallelism.tensor_parallel_degree=4")
    return Case(f"{variant}, {batch} rows", row["forward_backward_ms"], arguments, "block", world=4)


@cache
def run_of(arguments: tuple[str, ...], world: int) -> Run:
    """Return the run of a case."""
    config, *others = arguments
    file = ROOT / f"train_configs/{config}.toml"
    return read_run(build_job_config([f"--job.config_file={file}", *others]), world)


def seconds(case: Case, hardware: Hardware) -> float:
    """Return the modelled time of a case."""
    run = run_of(case.arguments, case.world)
    if case.how == "optimizer":  # and a copy of the gradients
        copies = Work(traffic=2 * 4 * elements(run.global_shapes))
        return optimizer_seconds(run, 0, hardware) + kernel_seconds(copies, hardware)
    if case.how == "factors":
        shapes = run.global_shapes.items()
        factors = {name: shape for name, shape in shapes if ".A." in name or ".B." in name}
        rest = {name: shape for name, shape in shapes if name not in factors}
        traffic = run.optimizer.adamw_traffic(rest)
        if case.name == "AdamW":  # nothing is clipped
            traffic += 0.3 * run.optimizer.adamw_traffic(factors)
        left_out = kernel_seconds(Work(traffic=traffic), hardware)
        return optimizer_seconds(run, 0, hardware) - left_out
    rehearsal = rehearse_run(run)
    if case.how == "block":
        block = Work().plus(rehearsal.block_work[0]).plus(rehearsal.block_work[1])
        host = block.launches * hardware.host_kernel_us + hardware.host_unit_us
        return max(product_seconds(block, hardware) + kernel_seconds(block, hardware), 1e-6 * host)
    time = step_time(run, [step_traffic(run, 0, rehearsal)], hardware, rehearsal)
    if run.config.optimizer.name in RULES:  # whose products were in fp32
        exact = run_of((*case.arguments, FP32), case.world)
        time = replace(time, optimizer=optimizer_seconds(exact, 0, hardware))
    work = work_of(run)
    odd = sum(n * f for (f, _), n in work.products.items() if f % (2 * 5461) == 0)
    aligned = hardware.peak_tflops * hardware.matmul_efficiency
    longer = case.odd * odd * (1 / UNALIGNED_TFLOPS - 1 / aligned) / 1e12
    return time.total + max(0.0, longer - time.host)


def work_of(run: Run) -> Work:
    """Return what one device computes in forward and backward of a micro-batch."""
    rehearsal, work = rehearse_run(run), Work()
    for block, ends in zip(rehearsal.block_work, rehearsal.ends_work, strict=True):
        work = work.plus(block, run.args.n_layers).plus(ends)
    return work


@dataclass(frozen=True)
class Modelled:
    """A line of the table."""

    part: str
    name: str
    measured: float  # milliseconds
    modelled: float

    @property
    def ratio(self) -> float:
        """Modelled over measured time."""
        return self.modelled / self.measured

    @property
    def why(self) -> str:
        """The reason of a row that differs; ``?`` without one."""
        far = abs(self.ratio - 1) > BOUND
        return REASONS.get((self.part, self.name), "?") if far else ""


def table_of(card: str, part: str, content: dict[str, Any]) -> Iterator[Modelled]:
    """Yield the timed rows of a part."""
    hardware = load_hardware(card)
    unit = HOST_UNIT_US.get(part, hardware.host_unit_us)
    for case in cases(part, content) if part not in NOT_MODELLED else ():
        modelled = 1e3 * seconds(case, replace(hardware, host_unit_us=unit))
        yield Modelled(f"{card} {part}", case.name, case.ms, modelled)


def steps() -> Iterator[list[str]]:
    """Yield CoLA's and full rank's steps on an H100 with their kernels and bytes, and ratios."""
    h100 = load_hardware("h100")
    kinds = {"captured": (ON, 0.0), "eager": (OFF, h100.host_unit_us), "slow": (OFF, SLOW_HOST)}
    for batch, tokens in ((2, 1024), (8, 1024), (96, 256)):
        times: dict[str, list[float]] = {"full": [], "cola": []}
        for family, found in times.items():
            for graph, unit in kinds.values():
                run = run_of((f"{family}_1b", BOOST, *_rows(batch, tokens), graph), 1)
                run = with_kept_inputs(run, h100.memory_gib * 2**30)
                rehearsal, host = rehearse_run(run), replace(h100, host_unit_us=unit)
                traffic = [step_traffic(run, 0, rehearsal)]
                found.append(step_time(run, traffic, host, rehearsal).total)
            work = work_of(run)
            size = work.traffic + sum(n * b for (_, b), n in work.products.items())
            _, flops = run.args.get_nparams_and_flops(empty_model(run.args), run.seq_len)
            ideal = run.tokens_per_step * flops / (h100.peak_tflops * 1e12)
            cells = [f"{1e3 * x:.0f} ({ideal / x:.0%})" for x in found]
            name = f"{batch} x {tokens:,} tokens, {family}"
            yield [name, f"{work.launches:,.0f}", f"{size / 1e9:.0f}", *cells]
        ratios = [f"{a / b:.2f}" for a, b in zip(*times.values(), strict=True)]
        yield ["full over cola", "", "", *ratios]


@dataclass(frozen=True)
class State:
    """The code before the remedies; each adds one of these."""

    pads: bool = False  # products of the odd width 5,461
    fuses: bool = False  # the loss between its products, twice the tokens at a time
    passes: int = 32  # bytes per parameter of FSDP2 on one rank: 24 without a division, 12
    keeps: bool = False  # inputs of products


STATES = {"before": State(), "odd widths padded": State(pads=True)}
STATES["loss compiled"] = State(True, True)
STATES["one rank: no division"] = State(True, True, 24)
STATES["one rank: no copies"] = State(True, True, 12)
STATES["inputs kept"] = State(True, True, 12, True)
ROWS, TOKENS = 8, 1024


def prepare(model: nn.Module, family: str, state: State) -> None:
    """Let a model apply its weights as in a state."""
    found: Any
    for found in model.modules():
        if getattr(found, "pads", False) is None:  # without data it pads nothing by itself
            found.pads = state.pads
    keeps = "on" if state.keeps and family == "cola" else "off"
    section = SimpleNamespace(mode="none", keep_inputs=keeps)
    config: Any = SimpleNamespace(activation_checkpoint=section)
    apply_activation_checkpoint(model, config)
    found = model.get_submodule("output")
    found.errors = errors_in_place if state.fuses else None


def by_recorder(family: str, state: State) -> Work:
    """Return the work of a compiled step's passes, with FSDP2's."""
    run = run_of((f"{family}_1b", "--model.flavor=1B", *_rows(ROWS, TOKENS), OFF), 1)
    workload = Workload(run.args, TPSettings(), 1, ROWS, TOKENS, torch.bfloat16, on_gpu=True)
    both = []
    for compiles in (True, state.fuses):  # of the blocks, and of the ends
        changes = partial(prepare, family=family, state=state)
        both.append(rehearse(replace(workload, compiles=compiles), changes))
    work = Work()
    for block, ends in zip(both[0].block_work, both[1].ends_work, strict=True):
        work = work.plus(block, run.args.n_layers).plus(ends)
    units = run.units_of(0).values()
    # A cast, and a copy, of each parameter; of a unit's gradients a cast, a copy and a division.
    each, of_unit = {32: (2, 3), 24: (2, 2), 12: (1, 1)}[state.passes]
    kernels = each * sum(map(len, units)) + of_unit * len(units)
    return work.plus(Work(traffic=state.passes * elements(run.global_shapes), kernels=kernels))


class _CompiledError(Exception):
    """Ends a call that has compiled forward and backward."""


def counted(call: Callable[[], Any]) -> tuple[int, float]:
    """Return kernels and bytes of inductor's code of a call, whose passes do not run."""
    from torch._inductor import async_compile, compile_fx, ir, metrics, output_code

    compile_fx.inductor_metrics_log.setLevel("INFO")  # it counts only what it may log
    compile_fx.inductor_metrics_log.propagate = False
    torch.compiler.config.force_disable_caches = True
    metrics.reset()
    stop = Mock(side_effect=_CompiledError)
    with (
        patch.object(functorch_config, "force_non_lazy_backward_lowering", True),
        patch.object(async_compile.AsyncCompile, "cpp_pybinding", Mock()),
        patch.object(output_code.CompiledFxGraph, "__call__", stop),
        suppress(_CompiledError),
    ):
        call()
    kernels = 0
    for node, _ in metrics.nodes_num_elem:  # without results of attention, and what is in place
        kernels += not isinstance(node.node, ir.MultiOutput | ir.NopKernel)
    return kernels, metrics.num_bytes_accessed


@cache
def by_inductor(family: str, state: State) -> tuple[int, float]:
    """Return kernels and bytes of one block of one row."""
    torch.compiler.reset()
    args = run_of((f"{family}_1b", "--model.flavor=1B"), 1).args
    with torch.device("meta"):
        model = LlamaModel(replace(args, n_layers=1, vocab_size=256, max_seq_len=TOKENS)).bfloat16()
    prepare(model.to_empty(device="cpu"), family, state)
    apply_compile(model, "inductor", state.keeps)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    return counted(lambda: model(tokens, targets=tokens))


def remedies() -> Iterator[list[str]]:
    """Yield the states, with kernels and bytes of full rank and of CoLA."""
    for name, state in STATES.items():
        cells = []
        for family in ("full", "cola"):
            work = by_recorder(family, state)
            size = work.traffic + sum(n * b for (_, b), n in work.products.items())
            cells += [f"{work.launches:,.0f}", f"{size / 1e9:.1f}"]
        for family in ("full", "cola"):
            of_block = State(pads=state.pads, keeps=state.keeps and family == "cola")
            kernels, moved = by_inductor(family, of_block)
            cells += [f"{kernels}", f"{moved / 1e6:,.0f}"]
        yield [name, *cells]


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Print the rows; return 1 if one differs without a reason."""
    parser = OneLineParser(prog="scripts.bench.modelled", description=__doc__)
    parser.add_argument("--steps", action="store_true", help="steps of CoLA and full rank instead")
    parser.add_argument("--remedies", action="store_true", help="a step before and after each")
    options: argparse.Namespace = parser.parse_args(argv)
    if options.remedies:
        head = [f"{x}, {unit}" for x in ("full", "CoLA") for unit in ("kernels", "GB")]
        head += [f"{x}'s block, {unit}" for x in ("full", "CoLA") for unit in ("kernels", "MB")]
        print(text_table(["8 x 1,024 tokens", *head], [*remedies()]))
        return 0
    if options.steps:
        head = ["kernels", "GB", "captured, ms (MFU)", "eager", "eager, slow host"]
        print(text_table(["H100", *head], [*steps()]))
        return 0
    lines = []
    for card in ("h100", "h200"):
        report = json.loads((ROOT / f"docs/data/{card}.json").read_text())
        for part, content in report["parts"].items():
            for row in table_of(card, part, content):
                times = f"{row.measured:.1f}", f"{row.modelled:.1f}", f"{row.ratio:.2f}"
                lines.append([row.part, row.name, *times, row.why])
    print(text_table(["part", "row", "measured, ms", "modelled, ms", "ratio", "why"], lines))
    return int(any(line[-1] == "?" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
