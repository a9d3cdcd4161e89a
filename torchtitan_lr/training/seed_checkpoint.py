# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a job's initial weights as a checkpoint of step 0, in one CPU process."""

import os
import socket
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
"""Overrides of settings that do not affect the initial weights or do not fit one process."""


def make_seed_checkpoint(arguments: list[str]) -> Path:
    """Write the seed checkpoint.

    Args:
        arguments: The launcher's arguments: the TOML file and overrides.

    Returns:
        Its folder.

    Raises:
        ConfigError: The job cannot run, or already has a checkpoint.
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
    # Imported late: torch looks for GPUs when it is imported.
    from torchtitan_lr.train import main as train

    status = train([*arguments, *ONE_PROCESS])
    if status:
        raise SystemExit(status)
    return folder / "step-0"
