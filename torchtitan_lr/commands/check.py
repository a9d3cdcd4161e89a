# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Check what `train` would refuse, without its devices, and run a pass without data.

    torchtitan-lr check CONFIG [--world N] [--section.key=value ...]

CONFIG is a TOML file or a shipped name; further arguments override it. With --world N the ranks are
N GPUs, wherever they are; else those with which `train` would start here. Files are looked for;
tokens are checked if they are prepared. Then forward and backward run as the first rank of every
pipeline stage, on tensors without data, with the model, plan and optimizer of the run, uncompiled
and without a codec.

Exit status: 0, or 2 with the reason in one line.
"""

import argparse

from torchtitan_lr.commands.parser import OneLineParser, check_at_least


def add_arguments(parser: OneLineParser) -> None:
    """Add CONFIG and the option."""
    parser.takes_overrides = True
    parser.add_shared("config")
    parser.add_argument("--world", type=int, help="GPUs; by default the ranks of this machine")


def run(args: argparse.Namespace) -> int:
    """Check and rehearse; return the exit status."""
    if args.world is not None:
        check_at_least(args, world=1)
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checks.fake_step import rehearse_ranks
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.data.prepare import is_prepared, prepare_for_ranks
    from torchtitan_lr.launch import run_folder
    from torchtitan_lr.launch.launcher import checked
    from torchtitan_lr.launch.placement import fit

    if args.world is None:
        placed = checked([args.config, *args.overrides], data="find")
        config, world, device = placed.config, placed.environment.world_size, placed.device
    else:
        arguments = [f"--job.config_file={args.config}", *args.overrides]
        config, world, device = build_job_config(arguments), args.world, "cuda"
        if fitted := fit(config, arguments, world):
            config = build_job_config([*arguments, *fitted])
    if args.world is not None or placed.environment.nodes > 1:  # as rank 0 does
        if run_folder.is_held(config.job.dump_folder):
            raise run_folder.taken(config.job.dump_folder)
        check_job_config(config, world, device, data="find")
    line = f"{world:,} ranks: checked"
    if is_prepared(config):
        check_job_config(config, world, device, data="prepared")
        prepare_for_ranks(config)
    else:
        line += ", but for tokens, which are not prepared"
    stages = rehearse_ranks(config, world)
    print(f"{line}; a pass runs as a rank of {stages} stage{'s'[: stages > 1]}")
    return 0
