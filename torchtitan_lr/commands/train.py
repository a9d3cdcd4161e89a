# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train the model of a TOML file.

    [VARIABLE=value ...] torchtitan-lr train [CONFIG] [--section.key=value ...]
    [VARIABLE=value ...] ./run_llama_train.sh [CONFIG] [--section.key=value ...]
    torchrun --nproc_per_node=8 -m torchtitan_lr train [CONFIG] [--section.key=value ...]

CONFIG is a TOML file or the name of a shipped one such as cola_60m; arguments override it.
  CONFIG_FILE   CONFIG where none is given (default ./train_configs/debug_cola.toml)
  NGPU          ranks on this machine, one per GPU, or CPU processes without GPUs (default: its
                GPUs, at most 4; without GPUs 4; CUDA_VISIBLE_DEVICES= trains on the CPU)
  LOG_RANK      ranks whose output is shown, by their number on this machine, e.g. 0,1 (default 0);
                the logs have all output
  COMM_MODE     fake_backend: a dry run of one step in one process, as rank 0 of NGPU, without a
                pipeline, whose stages `torchtitan-lr check` rehearses
  NNODES, RDZV_ENDPOINT, RDZV_ID   several machines: number, host:port of one, a common name;
                NNODES=2:4 starts with 2 to 4 machines and goes on with fewer when some are lost,
                by a restart
  MAX_RESTARTS  how often failed ranks are started again, from the last checkpoint (default 0)
  RDZV_CONF     torchrun's times, e.g. join_timeout=600,last_call_timeout=30 (seconds)
  PYTHON        the interpreter to use or to make .venv from
SIGTERM or Ctrl-C finishes the step, saves a checkpoint and exits 0; another one, a second or more
later, kills at once. SIGUSR1, a scheduler's notice, does the same and may be repeated.
"""

import argparse
import os
import subprocess
from typing import TYPE_CHECKING

from torchtitan_lr.commands.parser import OneLineParser

if TYPE_CHECKING:  # it imports the checks
    from torchtitan_lr.launch.placement import Placement


def add_arguments(parser: OneLineParser) -> None:
    """Take all arguments: the launcher reads CONFIG and the overrides."""
    parser.takes_all = True
    parser.usage = "[VARIABLE=value ...] %(prog)s [CONFIG] [--section.key=value ...]"


def run(args: argparse.Namespace) -> int:
    """Train: as a rank under torchrun, else through the launcher; return the exit status."""
    from torchtitan_lr.launch.launcher import main, train_arguments
    from torchtitan_lr.launch.placement import read_environment
    from torchtitan_lr.launch.processes import begin_rank, exit_without_teardown

    if "TORCHELASTIC_RUN_ID" in os.environ:
        begin_rank()
        from torchtitan_lr.train import main as train_rank

        exit_without_teardown(train_rank(train_arguments(args.arguments, read_environment())))
    exit_without_teardown(main(args.arguments, tell_modelled))


def tell_modelled(placed: "Placement") -> None:
    """Print the last line of `estimate`, if a shipped file describes the GPUs of a run."""
    from torchtitan_lr.costs.hardware import DEVICES, load_hardware

    name = DEVICES.get(gpu_name()) if placed.device == "cuda" else None
    if name is None:
        return
    from torchtitan_lr.commands.estimate_report import in_one_line
    from torchtitan_lr.costs.described_run import read_run

    hardware, run = load_hardware(name), read_run(placed.config, placed.environment.world_size)
    compares = run.args.lanes == 1  # else a rank that has them all takes many seconds of a core
    print(f"{hardware.name}, {in_one_line(run, hardware, compares)}", flush=True)


def gpu_name() -> str:
    """Return what the driver calls this machine's first GPU; empty where it does not answer."""
    # Not by torch, which would open the device: a launcher computes nothing there.
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.partition("\n")[0].strip()
