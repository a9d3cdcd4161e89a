# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Count the collectives of one training step, and print them beside the formulas.

    torchtitan-lr measure-comm CONFIG [--json] [--section.key=value ...]

CONFIG is a TOML file or a shipped name; further arguments override it. The step runs on NGPU ranks
of this machine (default: its GPUs, at most 4, or 4 gloo processes without GPUs). Elements are those
of the logical tensor, once per call. Equal decoder blocks are shown as one, `block`. The scalars of
the scope `step` (clipping, logging) have no formula; collectives that activation checkpointing
repeats are counted by running the model on tensors without data. A message over two mesh dimensions
has both names, `fsdp_tp`. The last lines have the formulas' bytes of gradients between
data-parallel ranks, in an average step, if they travelled in float32 and in bfloat16.
"Overlapped MFLOP" are the products that a rank issues between the start of a collective and its
wait, the least and the most of a block if blocks differ, rated as on a device.

Exit status: 0 all rows agree, 1 rows differ or the run failed, 2 invalid configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.start import place_run, report_from_rank, run_on_ranks

if TYPE_CHECKING:
    from torchtitan_lr.costs.described_run import Run

QUIET = [
    "--training.steps=1",
    "--lr_scheduler.warmup_steps=0",
    "--validation.no_enable",
    "--checkpoint.no_enable",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
]
"""Overrides for a single step that writes no files."""

KEYS = ("scope", "pass", "op", "mesh_dim", "dtype", "calls", "elements", "bytes")

OVERLAP = ("overlapped_flops", "most_overlapped_flops")


def measure(arguments: list[str]) -> list[dict[str, Any]]:
    """Run one step on this rank."""
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.training.trainer import Trainer

    trainer = Trainer(build_job_config(arguments))
    trainer.step = 1
    with trainer.new_ledger() as ledger:
        trainer.train_step(iter(trainer.dataloader))
    rows = ledger.rows()
    trainer.close()
    return rows


def one_block(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge equal blocks into one, with the least and the most FLOPs that overlap."""
    whole = [row | {"most_overlapped_flops": row["overlapped_flops"]} for row in table]
    blocks: dict[str, list[dict[str, Any]]] = {}
    compared: dict[str, list[dict[str, Any]]] = {}
    for row in whole:
        if row["scope"].startswith("block "):
            same = {key: value for key, value in row.items() if key not in ("scope", *OVERLAP)}
            blocks.setdefault(row["scope"], []).append(row)
            compared.setdefault(row["scope"], []).append(same)
    first, *others = compared.values() or [[]]
    if not first or any(other != first for other in others):
        return whole
    merged = []
    for rows in zip(*blocks.values(), strict=True):
        flops = [row["overlapped_flops"] for row in rows]
        ends = {"overlapped_flops": min(flops), "most_overlapped_flops": max(flops)}
        merged.append(rows[0] | {"scope": "block"} | ends)
    place = next(i for i, row in enumerate(whole) if row["scope"] in blocks)
    rest = [row for row in whole[place:] if row["scope"] not in blocks]
    return [*whole[:place], *merged, *rest]


def run_ranks(arguments: list[str]) -> tuple[list[dict[str, Any]], Run]:
    """Run one step on all ranks of this machine and compare the counts with the formulas."""
    from torchtitan_lr.costs.comparison import compare
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.rank_memory import repeated_by_block
    from torchtitan_lr.costs.step_traffic import step_traffic

    with TemporaryDirectory() as folder:  # the configuration's own may have a run
        placed = place_run([*arguments, f"--job.dump_folder={folder}"])
    config, ranks = placed.config, placed.environment.ranks
    if config.parallelism.pipeline_parallel_degree > 1:
        key = "parallelism.pipeline_parallel_degree"
        raise ConfigError(key, config.parallelism.pipeline_parallel_degree, "1 for this command")
    run = read_run(config, ranks)
    # The collectives of an optimizer over the replicas are in the scope `step`.
    expected = [row for row in step_traffic(run, 0) if row.scope != "step"]
    expected += repeated_by_block(run)
    rows = run_on_ranks(__name__, placed.arguments, ranks)
    return compare(rows, expected, run.wire_dtypes), run


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or a shipped name")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")


def run(args: argparse.Namespace) -> int:
    """Run the step and print the comparison; return the exit status."""
    table, paper = run_ranks([f"--job.config_file={args.config}", *args.overrides, *QUIET])
    from torchtitan_lr.costs.comparison import differences

    rows = one_block(table)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print(as_text(rows), total_as_text(table), gradients_as_text(paper), sep="\n\n")
    return 1 if any(differences(table)) else 0


def as_text(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a table; a formula's number that agrees is shown as ``=``."""
    lines = []
    for row in rows:
        wanted = []
        for key in ("calls", "elements"):
            expected = row[f"expected_{key}"]
            number = "-" if expected is None else str(expected)
            wanted.append("=" if expected == row[key] else number)
        least, most = (f"{row[key] / 1e6:.1f}" for key in OVERLAP)
        megaflops = least if least == most else f"{least} to {most}"
        lines.append([*(str(row[key]) for key in KEYS), *wanted, megaflops])
    header = (*KEYS, "expected calls", "expected elements", "overlapped MFLOP")
    return text_table(header, lines, left=5)


def total_as_text(table: list[dict[str, Any]]) -> str:
    """Say how many bytes rank 0 passes to collectives in the step: those of blocks, and others."""
    blocks = {row["scope"] for row in table if row["scope"].startswith("block ")}
    whole = sum(row["bytes"] for row in table)
    inside = sum(row["bytes"] for row in table if row["scope"] in blocks)
    parts = f"{len(blocks)} blocks {inside / 1e6:.2f} MB, the rest {(whole - inside) / 1e6:.2f} MB"
    return f"total per step of rank 0: {whole / 1e6:.2f} MB ({parts})"


def gradients_as_text(run: Run) -> str:
    """Format the bytes of a run's gradients in an average step, and AdamW's, by wire dtype."""
    from torchtitan_lr.costs.step_traffic import WIRES, gradient_bytes

    adamw = replace(run, baseline=True)
    sizes = {
        "as configured": gradient_bytes(run, 0),
        "AdamW, uncompressed": gradient_bytes(adamw, 0),
    }
    lines = []
    for name, sent in sizes.items():
        lines.append([name, *(str(sent.get(wire, "-")) for wire in WIRES)])
    return text_table(["gradients, bytes per step", *WIRES], lines)


if __name__ == "__main__":
    report_from_rank(measure, sys.argv[1:])
