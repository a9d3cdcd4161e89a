# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train the model of a TOML file.

    [VARIABLE=value ...] torchtitan-lr train [CONFIG] [--section.key=value ...]
    [VARIABLE=value ...] ./run_llama_train.sh [CONFIG] [--section.key=value ...]
    torchrun --nproc_per_node=8 -m torchtitan_lr train [CONFIG] [--section.key=value ...]

CONFIG is a TOML file or the name of a shipped one such as cola_60m; arguments override it, e.g.
--training.steps=100.
  CONFIG_FILE   CONFIG where none is given (default ./train_configs/debug_cola.toml)
  NGPU          ranks on this machine, one per GPU, or CPU processes without GPUs (default: its
                GPUs, at most 4; without GPUs 4; CUDA_VISIBLE_DEVICES= trains on the CPU)
  LOG_RANK      ranks whose output is shown, by their number in the run, e.g. 0,8 (default 0): of
                several machines one console has the lines; the logs have all output
  COMM_MODE     fake_backend: a dry run of one step in one process, as rank 0 of NGPU
  NNODES, RDZV_ENDPOINT, RDZV_ID   several machines: number, host:port of one, a common name;
                NNODES=2:4 starts with 2 to 4 machines and goes on with fewer when some are lost
  MAX_RESTARTS  how often failed ranks are started again, from the last checkpoint (default 0)
  RDZV_CONF     torchrun's times, e.g. join_timeout=600,last_call_timeout=30 (seconds)
  PYTHON        the interpreter to use or to make .venv from
`torchtitan-lr config show CONFIG` prints all keys.
SIGTERM or Ctrl-C finishes the step, saves a checkpoint and exits 0; another one, a second or more
later, kills at once. SIGUSR1, a scheduler's notice, does the same and may be repeated.

--checkpoint.create_seed_checkpoint writes the initial weights as a checkpoint of step 0, in one
process on the CPU, and prints its folder. A job with the same dump folder, or whose
checkpoint.initial_load_path names it, starts from these weights in any layout and on any device.
"""

import argparse
import os
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.errors import ConfigError

ONE_PROCESS = [
    "--parallelism.data_parallel_replicate_degree=1",
    "--parallelism.data_parallel_shard_degree=-1",
    "--parallelism.tensor_parallel_degree=1",
    "--parallelism.pipeline_parallel_degree=1",
    "--parallelism.context_parallel_degree=1",
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


def add_arguments(parser: OneLineParser) -> None:
    """Take all arguments: the launcher reads CONFIG and the overrides."""
    parser.takes_all = True
    parser.usage = "[VARIABLE=value ...] %(prog)s [CONFIG] [--section.key=value ...]"


def run(args: argparse.Namespace) -> int:
    """Train: as a rank under torchrun, else through the launcher; return the exit status."""
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.launch.environment import read_environment
    from torchtitan_lr.launch.launcher import main, train_arguments
    from torchtitan_lr.launch.processes import exit_without_teardown

    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torchtitan_lr.train import main as train_rank

        exit_without_teardown(train_rank(train_arguments(args.arguments, read_environment())))
    arguments = train_arguments(args.arguments, read_environment())
    if build_job_config(arguments).checkpoint.create_seed_checkpoint:
        print(make_seed_checkpoint(arguments))
        return 0
    exit_without_teardown(main(args.arguments))


def make_seed_checkpoint(arguments: list[str]) -> Path:
    """Write the seed checkpoint.

    Args:
        arguments: The launcher's arguments: the TOML file and overrides.

    Returns:
        Its folder.

    Raises:
        ConfigError: The job cannot run, or already has a checkpoint.
    """
    from torchtitan_lr.config.build import build_job_config

    config = build_job_config([*arguments, *ONE_PROCESS])
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    if folder.is_dir() and any(folder.glob("step-*")):
        want = f"a folder without checkpoints; {folder} has some"
        raise ConfigError("job.dump_folder", config.job.dump_folder, want)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update(alone)
    # Imported late: torch looks for GPUs when it is imported.
    from torchtitan_lr.launch.agent import LOOPBACK, loopback_store
    from torchtitan_lr.train import main as train

    # A store that torch opens by itself would listen on all interfaces, so this one is given.
    store = loopback_store()
    os.environ.update(
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    status = train([*arguments, *ONE_PROCESS])
    if status:
        raise SystemExit(status)
    return folder / "step-0"
