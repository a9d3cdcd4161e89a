# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimate a run's memory, communication and step time, without its devices.

    torchtitan-lr estimate train_configs/boost_13b.toml
    torchtitan-lr estimate CONFIG --world 1024 --training.global_batch_size=-1
    torchtitan-lr estimate CONFIG --hardware h200 --json [--section.key=value ...]
    torchtitan-lr estimate CONFIG --plans full,vanilla_replicated,btp
    torchtitan-lr estimate cola_1b full_1b tsr_1b --world 8

Prints parameters, FLOPs per token, the memory of the rank that needs most, the bytes that a rank
passes to its collectives per step, and a modelled step time. One CONFIG stands beside its model on
the same ranks and batches with AdamW under --plans; several CONFIGs stand beside each other.
Further arguments override the TOMLs, as in a run. All plans have the same activation checkpointing,
"full" where full rank stands beside "low_rank".

Weights, gradients, optimizer state and bytes are exact. Activations are counted by running
uncompiled blocks on tensors without data, with a GPU's norms ("working" is the additional memory
of backward); "buffers" include FSDP's unsharded weights. The step time is a model, compared with
published times in docs/results.md; "compute" is products and attention. With context parallelism
the other value of parallelism.cp_gather has a column.

--hardware h100 has 400 Gbit/s a device between nodes; h100_400gbit has it a node of eight devices.

Exit status: 0, or 2 for an invalid configuration, number of ranks or hardware.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lr.commands.parser import OneLineParser, check_at_least, check_toml
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.errors import ConfigError, require

if TYPE_CHECKING:
    from torchtitan_lr.costs.described_run import Run


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_argument("configs", metavar="CONFIG", nargs="+", help="TOML files or shipped names")
    parser.add_argument(
        "--world", type=int, help="ranks; by default the product of the TOML's degrees"
    )
    parser.add_argument("--hardware", default="h100", help="a shipped machine, or a TOML file")
    parser.add_argument(
        "--plans",
        default="full,vanilla,btp",
        help="of one CONFIG: some of full, vanilla, vanilla_replicated, btp, or of your own",
    )
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")


def run(args: argparse.Namespace) -> int:
    """Print the estimate; return the exit status."""
    if args.world is not None:
        check_at_least(args, world=1)
    for path in args.configs:
        check_toml(path)
    from torchtitan_lr.costs.hardware import load_hardware

    hardware = load_hardware(args.hardware)
    # Late: wrong paths and numbers are reported without torch.
    from torchtitan_lr.commands.estimate_report import alternatives, as_text, estimate, read_plans

    names = [Path(path).stem for path in args.configs]
    want = "files of different names"
    require(len({*names}) == len(names), "CONFIG", " ".join(args.configs), want)
    first, *others = (read_paper_run(path, args.world, args.overrides) for path in args.configs)
    runs: dict[str, Run | ConfigError] = dict(zip(names, [first, *others], strict=True))
    if not others:
        plans = read_plans(args.plans)
        runs = {"as configured": first, **dict(alternatives(first, plans))}
    report = estimate(runs, hardware)
    print(json.dumps(report, indent=2) if args.json else as_text(report, hardware))
    return 0


def read_paper_run(path: str, world: int | None, overrides: Sequence[str]) -> "Run":
    """Read a run, fitted as in training, and check it for ``world`` ranks, by default its least."""
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.costs.described_run import read_run
    from torchtitan_lr.launch.placement import fit

    arguments = [f"--job.config_file={path}", *overrides]
    config = build_job_config(arguments)
    world = least_ranks(vars(config.parallelism)) if world is None else world
    if fitted := fit(config, arguments, world):
        config = build_job_config([*arguments, *fitted])
    check_job_config(config, world, "cuda", on_paper=True)
    return read_run(config, world)
