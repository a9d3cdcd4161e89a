# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Count the collectives of one training step, and print them beside the formulas.

    torchtitan-lr measure-comm CONFIG [--json] [--section.key=value ...]

The step runs on NGPU ranks of this machine. Elements are those of the logical tensor, once per
call. Equal decoder blocks are shown as one, `block`. The scalars of the scope `step` (clipping,
logging) have no formula; collectives that activation checkpointing repeats are counted by running
blocks on tensors without data. A message over two mesh dimensions has both names, `fsdp_tp`.

Exit status: 0 all rows agree, 1 rows differ or the run failed, 2 invalid configuration.
"""

import argparse
import json
import sys
from tempfile import TemporaryDirectory
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.errors import one_of, require
from torchtitan_lr.experiments.start import place_run, report_from_rank, run_on_ranks

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
    """Merge equal blocks into one."""
    from torchtitan_lr.ledger.ledger import reading_order

    blocks = {row["scope"] for row in table if row["scope"].startswith("block ")}
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table:
        if row["scope"] in blocks:
            kind = tuple(value for key, value in row.items() if key != "scope")
            kinds.setdefault(kind, []).append(row)
    if any(len(rows) != len(blocks) for rows in kinds.values()):
        return table
    merged = [row for row in table if row["scope"] not in blocks]
    merged += [rows[0] | {"scope": "block"} for rows in kinds.values()]
    return sorted(merged, key=reading_order)


def run_ranks(arguments: list[str]) -> list[dict[str, Any]]:
    """Run one step on all ranks of this machine and compare the counts with the formulas."""
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.costs.rehearsal import rehearse_run
    from torchtitan_lr.costs.step_traffic import compare, step_traffic
    from torchtitan_lr.parallel.checkpoint_modes import EAGER_MODES

    with TemporaryDirectory() as folder:  # the configuration's own may have a run
        placed = place_run([*arguments, f"--job.dump_folder={folder}"])
    config, ranks = placed.config, placed.environment.ranks
    degree = config.parallelism.pipeline_parallel_degree
    require(degree == 1, "parallelism.pipeline_parallel_degree", degree, "1 for this command")
    outer, want = config.outer.every, "0 for this command, which counts a step without an exchange"
    require(outer == 0, "outer.every", outer, want)
    run = read_run(config, ranks)
    # Only the compiler knows what its own mode repeats.
    known = run.tp == 1 or run.checkpointing in EAGER_MODES
    want = one_of(EAGER_MODES, run.checkpointing)
    require(known, "activation_checkpoint.mode", run.checkpointing, want)
    rehearsal = rehearse_run(run) if run.tp > 1 and run.checkpointing != "none" else None
    # The collectives of an optimizer over the replicas are in the scope `step`.
    expected = [row for row in step_traffic(run, 0, rehearsal) if row.scope != "step"]
    return compare(run_on_ranks(__name__, placed.arguments, ranks), expected, run.wire_dtypes)


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_shared("config", "--json")


def run(args: argparse.Namespace) -> int:
    """Run the step and print the comparison; return the exit status."""
    table = run_ranks([f"--job.config_file={args.config}", *args.overrides, *QUIET])
    from torchtitan_lr.costs.step_traffic import differences

    rows = one_block(table)
    print(json.dumps(rows, indent=1) if args.json else f"{as_text(rows)}\n\n{total(table)}")
    return 1 if differences(table) else 0


def as_text(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a table; a formula's number that agrees is shown as ``=``."""
    lines = []
    for row in rows:
        wanted = []
        for key in ("calls", "elements"):
            expected = row[f"expected_{key}"]
            number = "-" if expected is None else str(expected)
            wanted.append("=" if expected == row[key] else number)
        lines.append([*(str(row[key]) for key in KEYS), *wanted])
    header = (*KEYS, "expected calls", "expected elements")
    return text_table(header, lines, left=5)


def total(table: list[dict[str, Any]]) -> str:
    """Say how many bytes rank 0 passes to collectives in the step: those of blocks, and others."""
    blocks = {row["scope"] for row in table if row["scope"].startswith("block ")}
    whole = sum(row["bytes"] for row in table)
    inside = sum(row["bytes"] for row in table if row["scope"] in blocks)
    parts = f"{len(blocks)} blocks {inside / 1e6:.2f} MB, the rest {(whole - inside) / 1e6:.2f} MB"
    return f"total per step of rank 0: {whole / 1e6:.2f} MB ({parts})"


if __name__ == "__main__":
    report_from_rank(measure, sys.argv[1:])
