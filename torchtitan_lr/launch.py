# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Starts a training run: checks it, starts its ranks, stops them well, sums it up.

``python -m torchtitan_lr.launch ARGUMENTS`` reads torchtitan's environment variables (see
:data:`USAGE`). Refusals come before any rank starts, as one line and exit status 2.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_lr.config_checks import build_job_config, check_job_config
from torchtitan_lr.config_types import CONFIG_FILE_KEY, split_arguments
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.processes import RankGroup
from torchtitan_lr.report import describe_failure, last_words, read_summary, summary_lines

DEFAULT_CONFIG_FILE = "./train_configs/debug_cola.toml"
DEFAULT_RANKS = 4

# Processes on one machine; a dry run starts only one of them.
MAX_RANKS = 1024
MAX_DRY_RANKS = 1_000_000
MAX_NODES = 100_000

USAGE = """\
usage: [VARIABLE=value ...] ./run_llama_train.sh [--section.key=value ...]

Trains the model of a TOML file; arguments override it, e.g. --training.steps=100.
  CONFIG_FILE   the TOML file (default ./train_configs/debug_cola.toml)
  NGPU          ranks on this machine, a GPU or (without any) a CPU process each; by default 4,
                and those on the CPU if there are fewer GPUs
  LOG_RANK      ranks whose output is shown, e.g. 0,1 (default 0); all of it goes to the logs
  COMM_MODE     fake_backend: a dry run of one step in one process, as rank 0 of NGPU
  NNODES, RDZV_ENDPOINT, RDZV_ID   several machines: their number, host:port of one, a common name
  PYTHON        the interpreter to use or to make .venv from
The keys are described in torchtitan_lr/job_config.py and in torchtitan's config/job_config.py.
SIGTERM or Ctrl-C finishes the step, saves a checkpoint and exits 0; a second one kills at once."""


@dataclass(frozen=True)
class Environment:
    """The environment variables of a launch, checked.

    Args:
        ranks: Ranks on this machine.
        nodes: Number of machines.
        log_ranks: Local ranks shown on the console, e.g. ``0,1``.
        comm_mode: torchtitan's ``comm.mode``, empty for a real run.
        train_module: The module every rank runs.
        ranks_given: Whether the user asked for that many ranks.
        hide_gpus: Whether the ranks compute on the CPU although there are GPUs.
    """

    ranks: int
    nodes: int
    log_ranks: str
    comm_mode: str
    train_module: str
    ranks_given: bool = True
    hide_gpus: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.ranks * self.nodes


def read_environment() -> Environment:
    """Reads and checks torchtitan's environment variables.

    Raises:
        ConfigError: A variable that is not what it should be.
    """
    comm_mode = os.environ.get("COMM_MODE", "")
    if comm_mode not in ("", "default", "fake_backend"):
        raise ConfigError("COMM_MODE", comm_mode, "'fake_backend', or leave it out")
    limit = MAX_DRY_RANKS if comm_mode == "fake_backend" else MAX_RANKS
    ranks = _positive_variable("NGPU", DEFAULT_RANKS, limit)
    nodes = _positive_variable("NNODES", 1, MAX_NODES)
    log_ranks = os.environ.get("LOG_RANK") or "0"
    shown = [rank.strip() for rank in log_ranks.split(",")]
    if not all(rank.isdecimal() and len(rank) < 9 and int(rank) < ranks for rank in shown):
        raise ConfigError("LOG_RANK", log_ranks, f"ranks from 0 to {ranks - 1} such as 0,1")
    if nodes > 1 and not os.environ.get("RDZV_ENDPOINT"):
        raise ConfigError("RDZV_ENDPOINT", "", f"host:port of one of the {nodes} machines")
    return Environment(
        ranks=ranks,
        nodes=nodes,
        log_ranks=",".join(str(int(rank)) for rank in shown),
        comm_mode="" if comm_mode == "default" else comm_mode,
        train_module=os.environ.get("TRAIN_FILE") or "torchtitan_lr.train",
        ranks_given=bool(os.environ.get("NGPU")),
    )


def _positive_variable(name: str, default: int, limit: int) -> int:
    text = os.environ.get(name) or str(default)
    # Its length first: Python itself refuses to read very many digits.
    if not text.isdecimal() or (len(text) < 99 and int(text) == 0):
        raise ConfigError(name, text, "a positive integer such as 4")
    if len(text) >= 99 or int(text) > limit:
        got = text if len(text) < 20 else f"{text[:16]}..."
        raise ConfigError(name, got, f"at most {limit:,}")
    return int(text)


def train_arguments(argv: list[str], environment: Environment) -> list[str]:
    """Completes the command line: the configuration file, and what a dry run adds.

    Args:
        argv: The launcher's own arguments.
        environment: What :func:`read_environment` returned.

    Returns:
        Arguments for :func:`build_job_config` and for every rank.
    """
    arguments = list(argv)
    if all(override.key != CONFIG_FILE_KEY for override in split_arguments(argv)):
        config_file = os.environ.get("CONFIG_FILE") or DEFAULT_CONFIG_FILE
        arguments = [f"--job.config_file={config_file}", *arguments]
    if environment.comm_mode:
        # As torchtitan's run_train.sh: one step is all that a dry run shows. There is nobody to
        # write the other ranks' parts of a checkpoint.
        mode = f"--comm.mode={environment.comm_mode}"
        arguments += [mode, "--training.steps=1", "--checkpoint.no_enable"]
    return arguments


def find_device(environment: Environment) -> str:
    """Says where the ranks will compute.

    Args:
        environment: What :func:`read_environment` returned.

    Returns:
        ``cuda``, ``xpu`` or ``cpu``. It is ``cpu`` in spite of GPUs where these are too few for
        the default number of ranks, of which the user asked for none.

    Raises:
        ConfigError: There are GPUs, but fewer than the ranks asked for.
    """
    name, count = _accelerator()
    if count and environment.ranks > count and not environment.comm_mode:
        # Machines must agree: one of several does not decide for itself.
        if environment.ranks_given or environment.nodes > 1 or name != "cuda":
            hide = "CUDA_VISIBLE_DEVICES=" if name == "cuda" else "ZE_AFFINITY_MASK="
            want = f"at most {count}, the GPUs of this machine (or {hide} to train on the CPU)"
            raise ConfigError("NGPU", environment.ranks, want)
        return "cpu"
    return name


def _accelerator() -> tuple[str, int]:
    """The type of this machine's devices, and how many there are; 0 for ``cpu``."""
    import torch

    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name, module.device_count()
    return "cpu", 0


def place_ranks(environment: Environment) -> tuple[Environment, str]:
    """Decides where the ranks compute, and says so in one line if it was not asked for.

    Args:
        environment: What :func:`read_environment` returned.

    Returns:
        The environment, completed, and what :func:`find_device` returned.

    Raises:
        ConfigError: As :func:`find_device`.
    """
    device = find_device(environment)
    if device != "cpu" or environment.ranks_given or environment.comm_mode:
        return environment, device
    _, count = _accelerator()
    found = {0: "no GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")
    more = f"; NGPU={count} trains on what is there" if count else ""
    print(f"{found} here: training on {environment.ranks} CPU processes{more}", flush=True)
    return replace(environment, hide_gpus=count > 0), device


def build_command(
    environment: Environment, arguments: list[str], log_folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Builds the command that starts all ranks of this machine, and its environment.

    Args:
        environment: What :func:`read_environment` returned.
        arguments: What :func:`train_arguments` returned.
        log_folder: Where torchrun writes each rank's output.
    """
    variables = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # torchrun would set 1; a single rank deserves all cores, and more than all only slows down.
    if not variables.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // environment.ranks))
    variables["PYTHONUNBUFFERED"] = "1"
    if environment.hide_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if environment.comm_mode:
        variables |= {"NGPU": str(environment.ranks), "LOCAL_RANK": "0", "RANK": "0"}
        return [sys.executable, "-m", environment.train_module, *arguments], variables
    rendezvous = ["--standalone"]
    if environment.nodes > 1:
        rendezvous = [
            f"--nnodes={environment.nodes}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={os.environ['RDZV_ENDPOINT']}",
            f"--rdzv_id={os.environ.get('RDZV_ID') or 'torchtitan_lr'}",
        ]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous),
        f"--nproc_per_node={environment.ranks}",
        f"--local-ranks-filter={environment.log_ranks}",
        *("--role", "rank", "--tee", "3", "--log-dir", str(log_folder)),
        *("-m", environment.train_module, *arguments),
    ]
    return command, variables


def make_log_folder(dump_folder: Path) -> Path:
    """Makes the folder of this launch's output.

    Args:
        dump_folder: The run's ``job.dump_folder``.

    Returns:
        A new folder below it.

    Raises:
        ConfigError: It cannot be made.
    """
    folder = dump_folder / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        want = f"a folder in which {folder} can be made ({error.strerror})"
        raise ConfigError("job.dump_folder", str(dump_folder), want) from error
    return folder


def run(environment: Environment, arguments: list[str], log_folder: Path, config: Any) -> int:
    """Runs all ranks to their end and reports.

    Args:
        environment: What :func:`read_environment` returned.
        arguments: What :func:`train_arguments` returned.
        log_folder: What :func:`make_log_folder` returned.
        config: What :func:`build_job_config` returned for them.

    Returns:
        The exit status: 0 for a run that ended, or that a signal stopped and that saved.
    """
    dump_folder = Path(config.job.dump_folder)
    command, variables = build_command(environment, arguments, log_folder)
    begin = time.time()
    # A dry run is one process below no torchrun: its output is the console's.
    expected = 0 if environment.comm_mode else environment.ranks
    group = RankGroup(command, variables, log_folder / "launcher.log", expected)
    status = group.wait()
    if group.killed:
        what = "killed" if group.was_ready else "stopped before training began"
        print(f"error: {what} by {group.signal_name}; logs: {log_folder}", file=sys.stderr)
        return 128 + group.signal_number
    if expected and "0" not in environment.log_ranks.split(","):
        for line in last_words(log_folder):
            print(f"[rank0]:{line}", file=sys.stderr)
    if status != 0:
        if expected:
            print(f"error: {describe_failure(log_folder, status)}", file=sys.stderr)
        return status if 0 < status < 126 else 1
    if not expected:
        print(f"dry run passed: one step as rank 0 of {environment.world_size}")
        return 0
    summary = read_summary(dump_folder, newer_than=begin)
    if summary is not None:
        print("\n".join(summary_lines(summary, dump_folder, log_folder)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 well, 2 refused, else failed.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(argument in ("-h", "--help") for argument in argv):
        print(USAGE)
        return 0
    try:
        environment = read_environment()
        arguments = train_arguments(argv, environment)
        config = build_job_config(arguments)
        if environment.comm_mode:
            # Beside the real run's curve, not over it.
            arguments.append(f"--job.dump_folder={Path(config.job.dump_folder) / 'dry_run'}")
            config = build_job_config(arguments)
        environment, device_type = place_ranks(environment)
        check_job_config(config, environment.world_size, device_type)
        log_folder = make_log_folder(Path(config.job.dump_folder))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(environment, arguments, log_folder, config)


if __name__ == "__main__":
    sys.exit(main())
