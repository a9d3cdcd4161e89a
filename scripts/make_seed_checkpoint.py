#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write the initial weights of a job as a checkpoint of step 0, on one CPU process.

The job itself, started afterwards with the same dump folder, begins from it in any parallel layout
and on any device, whose own random numbers would differ::

    python scripts/make_seed_checkpoint.py train_configs/debug_cola.toml --job.dump_folder=outputs/a

Other jobs name the folder it prints in ``checkpoint.initial_load_path``. The script prints it alone
on the last line.
"""

import os
import socket
import sys
from pathlib import Path

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

ONE_PROCESS = [
    "--parallelism.data_parallel_replicate_degree=1",
    "--parallelism.data_parallel_shard_degree=-1",
    "--parallelism.tensor_parallel_degree=1",
    "--parallelism.pipeline_parallel_degree=1",
    "--training.global_batch_size=-1",
    "--training.no_enable_cpu_offload",
    "--activation_checkpoint.mode=none",
    "--compile.no_enable",
    "--validation.no_enable",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
    "--profiling.no_enable_profiling",
    "--profiling.no_enable_memory_snapshot",
    "--checkpoint.enable",
    "--checkpoint.async_mode=disabled",
    "--checkpoint.load_step=-1",
    "--checkpoint.create_seed_checkpoint",
]
"""What of a job has no part in its initial weights, or does not fit one process."""


def make_seed_checkpoint(arguments: list[str]) -> Path:
    """Write the checkpoint.

    Args:
        arguments: As on the launcher's command line: the TOML file and overrides.

    Returns:
        Its folder.

    Raises:
        ConfigError: For a job that cannot run, or one that has a checkpoint already.
    """
    config = build_job_config([*arguments, *ONE_PROCESS])
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    if folder.is_dir() and any(folder.glob("step-*")):
        want = f"a folder without checkpoints; {folder} has some"
        raise ConfigError("job.dump_folder", config.job.dump_folder, want)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update(alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    # Late: torch looks for GPUs when it is imported.
    from torchtitan_lr.train import main as train

    status = train([*arguments, *ONE_PROCESS])
    if status:
        raise SystemExit(status)
    return folder / "step-0"


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status: 0, or 2 with one line on stderr.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: make_seed_checkpoint.py CONFIG [--section.key=value ...]\n\n{__doc__}")
        return 0 if arguments else 2
    try:
        print(make_seed_checkpoint([f"--job.config_file={arguments[0]}", *arguments[1:]]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
