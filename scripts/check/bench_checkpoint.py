#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure what checkpoints cost: the pause of a step, seconds to save and to load, bytes read.

    NGPU=4 python scripts/check/bench_checkpoint.py CONFIG [--modes ...] [--section.key=value ...]

Every mode trains with NGPU ranks (default 1) of this machine in a temporary folder; TMPDIR chooses
its disk. It saves --saves times, with --steps steps before and after each save, and loads the last
checkpoint, whose pages are dropped from memory before. Columns:

    step       seconds per step without a save, the median of the slowest rank
    pause      seconds that the save stops the run
    meanwhile  seconds per step that began while a background save was being written
    complete   seconds from the start of the save until the checkpoint is complete
    load       seconds to verify and load the checkpoint
    read       bytes that all ranks read in the load, over the checkpoint's size: by system calls,
               and from the storage device (the rest was in memory)

Exit status: 0, 1 if a run failed, 2 for wrong arguments.
"""

import argparse
import json
import os
import sys
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiments import place_run, report_from_rank, run_on_ranks

MODES = ("disabled", "async", "async_with_pinned_mem")
HEADER = ["async_mode", "step", "pause", "meanwhile", "complete", "load", "read", "from device"]

QUIET = [
    "--compile.no_enable",
    "--validation.no_enable",
    "--checkpoint.enable",
    "--checkpoint.keep_latest_k=0",
    "--checkpoint.initial_load_path=",
    "--lr_scheduler.warmup_steps=0",
    "--metrics.log_freq=1000000",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
]


def measure(arguments: list[str]) -> dict[str, Any]:
    """Train, save and load on this rank (`scripts.bench.checkpoint_times`)."""
    from scripts.bench import checkpoint_times  # imported late: --help needs no torch

    return checkpoint_times.measure(arguments)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure every mode; print a table or JSON."""
    report_from_rank(measure, sys.argv[1:] if argv is None else argv)
    options = _parse(argv)
    steps = 2 + options.steps * (2 * options.saves + 1)  # checkpoint_times.WARMUP is 2
    arguments = [
        *(f"--job.config_file={options.config}", *options.overrides, *QUIET),
        *(f"--checkpoint.interval={options.steps}", f"--training.steps={steps}"),
    ]
    runs = {mode: [*arguments, f"--checkpoint.async_mode={mode}"] for mode in options.modes}
    # All are checked before the first one starts.
    placed = {mode: place_run(run, options.ranks) for mode, run in runs.items()}
    report: dict[str, Any] = {
        "ranks": options.ranks,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "modes": {
            mode: run_on_ranks(__file__, run.arguments, options.ranks)
            for mode, run in placed.items()
        },
    }
    print(json.dumps(report, indent=1) if options.json else as_text(report))
    return 0


def as_text(report: dict[str, Any]) -> str:
    """Format the report as a table with a line about the checkpoint above it.

    Args:
        report: ``ranks``, ``cores``, ``load`` and, by mode, the results of
            `checkpoint_times.measure`.
    """
    found = next(iter(report["modes"].values()))
    parts = ", ".join(f"{part / 1e6:.1f}" for part in found["parts"])
    head = (
        f"{found['checkpoint'] / 1e6:.1f} MB by {report['ranks']} ranks ({parts}); "
        f"{report['cores']} cores, load {report['load']:.1f}"
    )
    rows = []
    for mode, row in report["modes"].items():
        meanwhile = row["step_while_saving"]
        times = [f"{row[name]:.3f}" for name in ("step", "pause")]
        times.append(f"{meanwhile:.3f}" if meanwhile else "-")
        times += [f"{row[name]:.3f}" for name in ("on_disk", "load")]
        reads = [row[name] for name in ("read", "from_device")]
        shares = ["-" if n is None else f"{n / row['checkpoint']:.2f}x" for n in reads]
        rows.append([mode, *times, *shares])
    return f"{head}\n{text_table(HEADER, rows)}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file; NGPU sets the ranks")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["disabled", "async"], help="async_mode"
    )
    parser.add_argument("--saves", type=int, default=3, help="saves of each mode")
    parser.add_argument("--steps", type=int, default=4, help="steps before and after each save")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, saves=1, steps=1)
    world = os.environ.get("NGPU", "1")
    if not world.isdecimal() or int(world) < 1:
        raise ConfigError("NGPU", world, "a positive number")
    options.ranks = int(world)
    return options


if __name__ == "__main__":
    sys.exit(main())
