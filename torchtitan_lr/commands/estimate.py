# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimate a run's memory, communication and step time, without its devices.

    torchtitan-lr estimate CONFIG --world 1024 --training.global_batch_size=-1
    torchtitan-lr estimate CONFIG --hardware h200 --json [--section.key=value ...]
    torchtitan-lr estimate cola_1b full_1b tsr_1b --world 8
    torchtitan-lr estimate cola_7b --world 32 --layouts

Prints parameters, FLOPs per token, the memory of the rank that needs most, the bytes that a rank
passes to its collectives per step, and a modelled step time. One CONFIG stands beside its model on
the same ranks and batches with AdamW under --plans; several CONFIGs stand beside each other.
Further arguments override the TOMLs, as in a run. All plans have the same activation checkpointing,
"full" where full rank stands beside "low_rank".

Weights, gradients, optimizer state and bytes are exact. Activations are counted by running
uncompiled blocks on tensors without data, with a GPU's norms ("working" is the additional memory
of backward); "buffers" include FSDP's unsharded weights. The step time is a model, compared with
times of one GPU and published ones in docs/results.md; "compute" is products and attention, "host"
what the device waits for a host that launches kernel by kernel. With context parallelism all plans
gather keys and values.
"""

import argparse
import json
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, check_at_least
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.errors import ConfigError, require


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_argument("configs", metavar="CONFIG", nargs="+", help="TOML files or shipped names")
    ranks = "ranks; by default the product of the TOML's degrees"
    parser.add_argument("--world", type=int, help=ranks)
    parser.add_argument("--hardware", default="h100", help="a shipped machine, or a TOML file")
    plans = "of one CONFIG: some of full, vanilla, vanilla_replicated, btp, or of your own"
    parser.add_argument("--plans", default="full,vanilla,btp", help=plans)
    layouts = "of one CONFIG: all layouts, the fastest first"
    parser.add_argument("--layouts", action="store_true", help=layouts)
    parser.add_shared("--json")


def run(args: argparse.Namespace) -> int:
    """Print the estimate; return the exit status."""
    if args.world is not None:
        check_at_least(args, world=1)
    paths, given = {Path(path).stem: path for path in args.configs}, " ".join(args.configs)
    require(len(paths) == len(args.configs), "CONFIG", given, "files of different names")
    for path in args.configs:
        load_toml(find_config(path))
    from torchtitan_lr.costs.hardware import load_hardware

    hardware = load_hardware(args.hardware)
    # Late: wrong files and numbers are reported without torch.
    from torchtitan_lr.commands import estimate_report

    if args.layouts:
        require(len(paths) == 1, "--layouts", given, "one CONFIG")
        first = estimate_report.read_first(args.configs[0], args.world, args.overrides)
        found = estimate_report.report_layouts(first, hardware)
        print(json.dumps(found, indent=2) if args.json else estimate_report.layouts_as_text(found))
        return 0
    runs = estimate_report.read_runs(paths, args.world, args.plans, args.overrides)
    report = estimate_report.estimate(runs, hardware)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    print(estimate_report.as_text(report, hardware))
    own = next(iter(runs.values()))
    assert not isinstance(own, ConfigError)  # only alternatives are refused
    print(estimate_report.in_one_line(own, hardware))
    return 0
