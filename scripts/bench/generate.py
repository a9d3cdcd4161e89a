# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time generation: tokens/s of decoding and time to the first token, full rank against CoLA.

    python -m scripts.bench.generate --flavor 60M --batch 1,32
    python -m scripts.bench.generate --flavor 130M --variants full,cola --json

torchrun compares the plans of tensor parallelism, with the bytes that a rank sends per token:

    torchrun --nproc_per_node=4 -m scripts.bench.generate --variants megatron,caat,btp

The weights are random, the tokens are greedy. Variants run in turns, and every number is the median
over the repeats; a speed-up is the median of the ratios to the first variant within a repeat. The
CPU time of all threads and ranks depends less on other work of the machine. "busy" is the share of
the cores that processes used during the timed runs, by /proc/stat.

``weights`` is the speed-up if reading the weights, or multiplying by them, took all the time: the
ratio of the parameters that a token meets (all but the embedding). The head is full-rank in every
family, so that this limit is low for small models.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.oracle.generation import pass_bytes
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.config.schema import BUILT_IN_PLANS
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.decode import Choice, Decoder, Sampling, compile_blocks
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.generation import generation_settings, sharded_choice
from torchtitan_lr.parallel.placement import TPSettings
from torchtitan_lr.parallel.plans import PLANS, apply_tensor_parallel
from torchtitan_lr.titan.device import keep_freed_memory

Row: TypeAlias = dict[str, Any]
"""Measurements of one variant at one batch size, by name."""

SHARE = 0.5
"""CAAT-Net's p; there is one lane per rank."""

TIMES = ("first", "decode", "first_cpu", "decode_cpu")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time the variants and print a table, or JSON."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options = _parse(argv, ranks)
    if ranks > 1:
        dist.init_process_group("gloo")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "cpu, or a machine with a CUDA device")
    if options.device == "cpu":
        keep_freed_memory()  # as training does
    if options.threads:
        torch.set_num_threads(options.threads)
    models = {name: _build(name, options, ranks) for name in options.variants}
    before = _used_ticks()
    rows = [row for batch in options.batch for row in _measure(models, batch, options)]
    used, all_ticks = (b - a for a, b in zip(before, _used_ticks(), strict=True))
    if ranks > 1 and dist.get_rank():
        return 0
    report = {
        "ranks": ranks,
        "busy": used / max(1, all_ticks),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "options": vars(options),
        "rows": rows,
    }
    print(json.dumps(report, indent=2) if options.json else _table(report))
    return 0


def _used_ticks() -> tuple[int, int]:
    """Return the ticks of all cores in which they worked, and all ticks; zeros without /proc."""
    try:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    except OSError:
        return 0, 0
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _parse(argv: list[str] | None, ranks: int) -> argparse.Namespace:
    known = BUILT_IN_PLANS if ranks > 1 else tuple(FLAVORS)
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--flavor", choices=sorted(FLAVORS["cola"]), default="60M", help="size of the models"
    )
    parser.add_argument(
        "--variants",
        default="megatron,caat,btp" if ranks > 1 else "full,cola",
        help=f"of {', '.join(FLAVORS)}; under torchrun of {', '.join(BUILT_IN_PLANS)}; with commas",
    )
    parser.add_argument("--batch", default="1,32", help="numbers of prompts, with commas")
    parser.add_argument("--prompt_tokens", type=int, default=128, help="length of each prompt")
    parser.add_argument("--new_tokens", type=int, default=32, help="decoded per prompt")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each variant")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="to run on")
    parser.add_argument("--compile", action="store_true", help="compile the decoding steps")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch has them")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    options = parser.parse_args(argv)
    check_at_least(options, prompt_tokens=1, new_tokens=2, repeats=1, threads=0)
    options.variants = options.variants.split(",")
    for name in options.variants:
        if name not in known:
            parser.error(f"--variants: got {name!r}, expected some of {', '.join(known)}")
    try:
        options.batch = [int(number) for number in options.batch.split(",")]
    except ValueError:
        options.batch = [0]
    if min(options.batch) < 1:
        parser.error("--batch: got no positive integers, expected some such as 1,32")
    return options


@dataclass(frozen=True)
class Built:
    """A variant's model, or this rank's part of it.

    Attributes:
        model: The model.
        choice: What draws from its logits.
        settings: Its plan's settings; None in one process.
        mesh: The ranks; None in one process.
    """

    model: LlamaModel
    choice: Choice | None = None
    settings: TPSettings | None = None
    mesh: DeviceMesh | None = None


def _measure(models: dict[str, Built], batch: int, options: argparse.Namespace) -> list[Row]:
    """Time all variants at one batch size, in turns."""
    runs: dict[str, list[Row]] = {name: [] for name in options.variants}
    for repeat in range(options.repeats + 1):
        for name in options.variants:
            row = _run(models[name], batch, options)
            if repeat:  # the first one warms up
                runs[name].append(row)
    base, *_ = options.variants
    rows = []
    for name in options.variants:
        built = models[name]
        row = {"variant": name, "batch": batch, "cache_bytes": runs[name][0]["cache_bytes"]}
        row |= {key: median(run[key] for run in runs[name]) for key in TIMES}
        row["tokens_per_s"] = batch / row["decode"]
        row["tokens_per_cpu_s"] = batch / row["decode_cpu"]
        for key in TIMES:
            ratios = [a[key] / b[key] for a, b in zip(runs[base], runs[name], strict=True)]
            row[f"{key}_speed_up"] = median(ratios)
            row[f"{key}_spread"] = [min(ratios), max(ratios)]
        row["weights_speed_up"] = _met(models[base].model) / _met(built.model)
        row["weight_bytes"] = sum(p.numel() * p.element_size() for p in built.model.parameters())
        if built.settings is not None:
            row |= _traffic(built, batch, options)
        rows.append(row)
    return rows


def _build(name: str, options: argparse.Namespace, ranks: int) -> Built:
    plan, family = None, name
    if ranks > 1:
        plan, family = name, "cola" if PLANS[name].low_rank else "full"
    args = FLAVORS[family][options.flavor]
    args.max_seq_len = options.prompt_tokens + options.new_tokens
    if plan is not None and PLANS[plan].lanes:
        args.lanes, args.sync_fraction = ranks, SHARE
        args.check()
    model = empty_model(args).to(getattr(torch, options.dtype))
    extra: dict[str, Any] = {}
    if plan is not None:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        settings = generation_settings(SimpleNamespace(tp_plan=plan), args, ranks)
        apply_tensor_parallel(model, mesh, settings)
        extra = {
            "choice": partial(sharded_choice, Ranks.of(mesh)),
            "settings": settings,
            "mesh": mesh,
        }
    model.to_empty(device=options.device)
    model.init_weights()
    if options.compile:
        compile_blocks(model)
    return Built(model.eval(), **extra)


def _traffic(built: Built, batch: int, options: argparse.Namespace) -> Row:
    """Count the bytes that a rank sends for the first token and for each later one, per row."""
    assert built.settings is not None and built.mesh is not None
    decoder = _decoder(built, batch, options)
    ledger = CommLedger([built.model], {"tp": built.mesh.get_group()})
    row: Row = {}
    for key, tokens in (("first", options.prompt_tokens), ("decode", 1)):
        ledger.clear()
        with ledger:
            decoder.step()
        row[f"{key}_bytes"] = sum(entry["bytes"] for entry in ledger.rows()) / batch
        size = getattr(torch, options.dtype).itemsize
        predicted = pass_bytes(
            built.model.model_args, built.settings, built.mesh.size(), batch, tokens, 1, size
        )
        row[f"{key}_bytes_formula"] = predicted / batch
    return row


def _met(model: LlamaModel) -> int:
    """Return the number of parameters that a token is multiplied by."""
    embedding = model.model_args.vocab_size * model.model_args.dim
    return sum(parameter.numel() for parameter in model.parameters()) - embedding


def _decoder(built: Built, batch: int, options: argparse.Namespace) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, options.prompt_tokens)
    vocabulary = built.model.model_args.vocab_size
    return Decoder(
        built.model,
        torch.randint(vocabulary, shape, generator=generator).tolist(),
        [options.new_tokens] * batch,
        Sampling(0),
        [0] * batch,
        (),
        options.compile,
        built.choice,
    )


def _run(built: Built, batch: int, options: argparse.Namespace) -> Row:
    """Generate once; seconds of the first token and of each later step."""
    decoder = _decoder(built, batch, options)
    first, first_cpu = _timed(decoder.step)

    def rest() -> None:
        while any(decoder.running):
            decoder.step()

    decode, decode_cpu = _timed(rest)
    buffers = (t for layer in decoder.cache.layers for t in (layer.keys, layer.values))
    steps = options.new_tokens - 1
    return {
        "first": first,
        "first_cpu": first_cpu,
        "decode": decode / steps,
        "decode_cpu": decode_cpu / steps,
        "cache_bytes": sum(buffer.nbytes for buffer in buffers if buffer is not None),
    }


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a call, which ends by reading tokens.

    Several ranks begin together; their CPU seconds are added up, and the slowest one counts.
    """
    if dist.is_initialized():
        dist.barrier()
    started, started_cpu = time.perf_counter(), time.process_time()
    call()
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    if dist.is_initialized():
        found = [torch.tensor(value, dtype=torch.float64) for value in (seconds, cpu)]
        dist.all_reduce(found[0], dist.ReduceOp.MAX)
        dist.all_reduce(found[1])
        seconds, cpu = (value.item() for value in found)
    return seconds, cpu


def _table(report: dict[str, Any]) -> str:
    options = report["options"]
    title = (
        f"{options['flavor']} {options['dtype']}, {report['device']}, "
        f"{report['ranks']} x {report['threads']} threads, {100 * report['busy']:.0f}% busy, "
        f"{'compiled' if options['compile'] else 'eager'}, "
        f"torch {report['torch']}, prompts of {options['prompt_tokens']} tokens, "
        f"{options['new_tokens']} new"
    )
    header = ["variant", "batch", "tokens/s", "per CPU s", "speed-up", "CPU", "from-to"]
    header += ["first ms", "CPU ms", "speed-up", "CPU", "from-to", "cache MiB"]
    header += ["bytes/token", "formula", "to first"] if report["ranks"] > 1 else ["weights"]
    lines = []
    for row in report["rows"]:
        cells = [row["variant"], str(row["batch"]), f"{row['tokens_per_s']:,.1f}"]
        cells += [f"{row['tokens_per_cpu_s']:,.1f}", *_speed_ups(row, "decode")]
        cells += [f"{1e3 * row[key]:,.1f}" for key in ("first", "first_cpu")]
        cells += [*_speed_ups(row, "first"), f"{row['cache_bytes'] / 2**20:.2f}"]
        if report["ranks"] > 1:
            keys = ("decode_bytes", "decode_bytes_formula", "first_bytes")
            cells += [f"{row[key]:,.0f}" for key in keys]
        else:
            cells.append(f"{row['weights_speed_up']:.2f}x")
        lines.append(cells)
    return f"{title}\n{text_table(header, lines)}"


def _speed_ups(row: Row, key: str) -> list[str]:
    """Return the speed-ups of wall and CPU time, and the range of the latter."""
    low, high = row[f"{key}_cpu_spread"]
    medians = [f"{row[f'{name}_speed_up']:.2f}x" for name in (key, f"{key}_cpu")]
    return [*medians, f"{low:.2f}-{high:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
