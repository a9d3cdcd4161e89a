#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compare the estimated peak memory of a run with the GPU allocator's peak.

    NGPU=1 python scripts/check/check_gpu_memory.py CONFIG [--json] [--section.key=value ...]

Trains three steps on NGPU GPUs (default 1) of this machine, uncompiled like the estimate's blocks,
and compares the largest rank's peak of the last two steps with scripts/estimate.py's.

Exit status: 0 within ten percent, or skipped without a GPU; 1 further off, or the run failed; 2 the
configuration is refused.
"""

import json
import os
import sys
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.scaling.experiments import report_from_rank, run_on_ranks

TOLERANCE = 0.1

QUIET = [
    "--training.steps=3",
    "--lr_scheduler.warmup_steps=0",
    "--compile.no_enable",
    "--validation.no_enable",
    "--checkpoint.no_enable",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
]


def measure(arguments: list[str]) -> int:
    """Train on this rank and return the largest rank's peak of allocated bytes."""
    import torch

    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.training.trainer import Trainer

    trainer = Trainer(build_job_config(arguments))
    batches = trainer.batch_generator(trainer.dataloader)
    for step in (1, 2, 3):
        trainer.step = step
        trainer.train_step(batches)
        if step == 1:  # optimizer state and buffers exist from here on
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    peak = torch.tensor(torch.cuda.max_memory_allocated(), device="cuda")
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    trainer.close()
    return int(peak)


def estimated(arguments: list[str], world: int) -> dict[str, int]:
    """Return the estimate by part, for the rank that needs most."""
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.estimate.memory import rank_memory, rehearse_run
    from torchtitan_lr.estimate.run import read_run

    config = build_job_config(arguments)
    check_job_config(config, world, "cuda")
    run = read_run(config, world)
    rehearsal = rehearse_run(run)
    ranks = [rank_memory(run, pp_rank, rehearsal) for pp_rank in range(run.pp)]
    return max(ranks, key=lambda parts: parts["peak"])


def verdict(parts: dict[str, int], measured: int) -> tuple[str, bool]:
    """Return a line for each part and one for the peak, and whether it is within the tolerance.

    Args:
        parts: Returned by `estimated`.
        measured: The allocator's peak, in bytes.
    """
    error = parts["peak"] / measured - 1
    lines = [f"{name:12} {size / 2**30:9.3f} GiB" for name, size in parts.items()]
    lines.append(f"{'measured':12} {measured / 2**30:9.3f} GiB, the estimate is {error:+.1%} off")
    return "\n".join(lines), abs(error) <= TOLERANCE


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    report_from_rank(measure, sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file; NGPU sets the ranks")
    parser.add_argument("--json", action="store_true", help="print bytes instead of a table")
    options = parser.parse_with_overrides(argv)
    import torch

    world: Any = os.environ.get("NGPU", "1")
    if not world.isdecimal() or int(world) < 1:
        parser.error(f"NGPU must be a positive number, got {world!r}")
    arguments = [f"--job.config_file={options.config}", *options.overrides, *QUIET]
    if torch.cuda.device_count() < int(world):
        print(f"skipped: {world} GPU(s) wanted, {torch.cuda.device_count()} found")
        return 0
    parts = estimated(arguments, int(world))
    measured = int(run_on_ranks(__file__, arguments, int(world)))
    text, close = verdict(parts, measured)
    print(json.dumps({"estimated": parts, "measured": measured}) if options.json else text)
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
