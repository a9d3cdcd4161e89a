#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time generation: tokens/s of decoding and time to the first token, full rank against CoLA.

    python scripts/check/bench_generate.py --flavor 60M --batch 1,32
    python scripts/check/bench_generate.py --flavor 130M --variants full,cola,cola_latent --json

The weights are random, the tokens are greedy. Variants run in turns, and every number is the median
over the repeats; a speed-up is the median of the ratios to the first variant within a repeat. The
CPU time of the process counts all threads and depends less on other work of the machine.

``weights`` is the speed-up if reading the weights, or multiplying by them, took all the time: the
ratio of the parameters that a token meets (all but the embedding). The head is full-rank in every
family, so that this limit is low for small models.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeAlias

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.decode import Decoder, compile_blocks
from torchtitan_lr.inference.sampling import Sampling
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.tools.cli import OneLineParser, in_one_line, text_table

Row: TypeAlias = dict[str, Any]
"""Measurements of one variant at one batch size, by name."""

VARIANTS = {
    f"{family}{'_latent' if kind == 'latent' else ''}": (family, kind)
    for family in FLAVORS
    for kind in ("full", "latent")
    if (family, kind) != ("full", "latent")
}
"""Family and kind of the cache."""

TIMES = ("first", "decode", "first_cpu", "decode_cpu")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time the variants and print a table, or JSON."""
    options = _parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "cpu, or a machine with a CUDA device")
    if options.threads:
        torch.set_num_threads(options.threads)
    families = {VARIANTS[name][0] for name in options.variants}
    models = {family: _build(family, options) for family in sorted(families)}
    rows = [row for batch in options.batch for row in _measure(models, batch, options)]
    report = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "options": vars(options),
        "rows": rows,
    }
    print(json.dumps(report, indent=2) if options.json else _table(report))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--flavor", choices=sorted(FLAVORS["cola"]), default="60M", help="size of the models"
    )
    parser.add_argument(
        "--variants", default="full,cola", help="of " + ", ".join(VARIANTS) + "; with commas"
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
    parser.check_at_least(options, prompt_tokens=1, new_tokens=2, repeats=1, threads=0)
    options.variants = options.variants.split(",")
    for name in options.variants:
        if name not in VARIANTS:
            parser.error(f"--variants: got {name!r}, expected some of {', '.join(VARIANTS)}")
    try:
        options.batch = [int(number) for number in options.batch.split(",")]
    except ValueError:
        options.batch = [0]
    if min(options.batch) < 1:
        parser.error("--batch: got no positive integers, expected some such as 1,32")
    return options


def _measure(models: dict[str, LlamaModel], batch: int, options: argparse.Namespace) -> list[Row]:
    """Time all variants at one batch size, in turns; ``models`` by family."""
    runs: dict[str, list[Row]] = {name: [] for name in options.variants}
    for repeat in range(options.repeats + 1):
        for name in options.variants:
            family, kind = VARIANTS[name]
            row = _run(models[family], kind, batch, options)
            if repeat:  # the first one warms up
                runs[name].append(row)
    base, *_ = options.variants
    rows = []
    for name in options.variants:
        family, _ = VARIANTS[name]
        row = {"variant": name, "batch": batch, "cache_bytes": runs[name][0]["cache_bytes"]}
        row |= {key: median(run[key] for run in runs[name]) for key in TIMES}
        row["tokens_per_s"] = batch / row["decode"]
        row["tokens_per_cpu_s"] = batch / row["decode_cpu"]
        for key in TIMES:
            pairs = zip(runs[base], runs[name], strict=True)
            row[f"{key}_speed_up"] = median(a[key] / b[key] for a, b in pairs)
        row["weights_speed_up"] = _met(models[VARIANTS[base][0]]) / _met(models[family])
        rows.append(row)
    return rows


def _build(family: str, options: argparse.Namespace) -> LlamaModel:
    args = FLAVORS[family][options.flavor]
    args.max_seq_len = options.prompt_tokens + options.new_tokens
    with torch.device(options.device):
        model = LlamaModel(args)
        model.init_weights()
    model.to(getattr(torch, options.dtype)).eval()
    if options.compile:
        compile_blocks(model)
    return model


def _met(model: LlamaModel) -> int:
    """Return the number of parameters that a token is multiplied by."""
    embedding = model.model_args.vocab_size * model.model_args.dim
    return sum(parameter.numel() for parameter in model.parameters()) - embedding


def _run(model: LlamaModel, kind: str, batch: int, options: argparse.Namespace) -> Row:
    """Generate once; seconds of the first token and of each later step."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, options.prompt_tokens)
    prompts = torch.randint(model.model_args.vocab_size, shape, generator=generator).tolist()
    limits = [options.new_tokens] * batch
    seeds = [0] * batch
    decoder = Decoder(model, prompts, limits, Sampling(0), seeds, (), kind, options.compile)
    first, first_cpu = _timed(decoder.step)

    def rest() -> None:
        while any(decoder.running):
            decoder.step()

    decode, decode_cpu = _timed(rest)
    steps = options.new_tokens - 1
    return {
        "first": first,
        "first_cpu": first_cpu,
        "decode": decode / steps,
        "decode_cpu": decode_cpu / steps,
        "cache_bytes": decoder.cache.bytes,
    }


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a call, which ends by reading tokens."""
    started, started_cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - started, time.process_time() - started_cpu


def _table(report: dict[str, Any]) -> str:
    options = report["options"]
    title = (
        f"{options['flavor']} {options['dtype']}, {report['device']}, {report['threads']} threads, "
        f"{'compiled' if options['compile'] else 'eager'}, "
        f"torch {report['torch']}, prompts of {options['prompt_tokens']} tokens, "
        f"{options['new_tokens']} new"
    )
    header = ["variant", "batch", "tokens/s", "speed-up", "CPU", "weights"]
    header += ["first token ms", "speed-up", "CPU", "cache MiB"]
    lines = []
    for row in report["rows"]:
        cells = [row["variant"], str(row["batch"]), f"{row['tokens_per_s']:,.1f}"]
        cells += [f"{row[f'{key}_speed_up']:.2f}x" for key in ("decode", "decode_cpu", "weights")]
        cells += [f"{1e3 * row['first']:,.1f}"]
        cells += [f"{row[f'{key}_speed_up']:.2f}x" for key in ("first", "first_cpu")]
        lines.append([*cells, f"{row['cache_bytes'] / 2**20:.2f}"])
    return f"{title}\n{text_table(header, lines)}"


if __name__ == "__main__":
    sys.exit(main())
