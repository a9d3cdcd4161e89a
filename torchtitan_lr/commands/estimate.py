# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimate a run's memory, communication and step time, without its devices.

    torchtitan-lr estimate train_configs/boost_13b.toml
    torchtitan-lr estimate CONFIG --world 1024 --training.global_batch_size=-1
    torchtitan-lr estimate CONFIG --hardware h200 --json [--section.key=value ...]
    torchtitan-lr estimate CONFIG --plans full,vanilla_replicated,btp

Prints parameters, FLOPs per token, the memory of the rank that needs most by part, the bytes that a
rank passes to its collectives per step by mesh dimension and operation, and a modelled step time:
for the given configuration and, on the same ranks with the same batches and with AdamW, for
--plans, by default full rank, vanilla tensor parallelism and BTP. Further arguments override the
TOML, as in a run.

The plans use the same mode of activation checkpointing: the configured one, or "full" if that is
"low_rank" and full rank is compared, which does not support it.
--checkpointing btp=low_rank sets a column's mode.

Weights, gradients, optimizer state and bytes are exact. Activations are counted by running blocks
on tensors without data ("working" is the additional memory of backward); "buffers" include FSDP's
unsharded weights. Memory counts blocks as uncompiled. The step time is a model, compared with
published times in docs/results.md; "compute" is products and attention. A checkpoint holds every
weight and optimizer state once, and TAGC's residuals; --storage 2.5 adds its seconds at 2.5 GB/s.
With context parallelism both values of parallelism.cp_gather are compared. With a pipeline every
rank is listed; the table shows the ranks with most memory and most bytes.

Exit status: 0, or 2 for an invalid configuration, number of ranks or hardware.
"""

import argparse
import json
from math import isfinite

from torchtitan_lr.commands.parser import OneLineParser, check_at_least
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.variants import ALTERNATIVES, COMPARED_PLANS, read_plans


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or a shipped name")
    parser.add_argument(
        "--world", type=int, help="ranks; by default the product of the TOML's degrees"
    )
    parser.add_argument("--hardware", default="h100", help="a shipped machine, or a TOML file")
    parser.add_argument(
        "--plans",
        default=",".join(ALTERNATIVES),
        help=f"some of {','.join(COMPARED_PLANS)}, or of your own",
    )
    parser.add_argument(
        "--checkpointing",
        default="",
        metavar="COLUMN=MODE,...",
        help="modes of activation checkpointing of single --plans (default: one for all)",
    )
    parser.add_argument(
        "--storage",
        type=float,
        default=0.0,
        metavar="GB/s",
        help="bandwidth of the storage for all ranks together: adds the seconds of a checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")


def run(args: argparse.Namespace) -> int:
    """Print the estimate; return the exit status."""
    if not (args.storage >= 0 and isfinite(args.storage)):
        raise ConfigError("--storage", args.storage, "GB/s such as 2.5")
    if args.world is not None:
        check_at_least(args, world=1)
    plans = read_plans(args.plans, args.config, args.overrides)
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.estimate.hardware import load_hardware

    hardware = load_hardware(args.hardware)
    config = build_job_config([f"--job.config_file={args.config}", *args.overrides])
    world = least_ranks(vars(config.parallelism)) if args.world is None else args.world
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.commands.estimate_report import as_text, estimate
    from torchtitan_lr.estimate.run import read_run

    check_job_config(config, world, "cuda", on_paper=True)
    report = estimate(read_run(config, world), hardware, args.checkpointing, plans)
    print(json.dumps(report, indent=2) if args.json else as_text(report, hardware, args.storage))
    return 0
