# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whole runs as a user starts them: processes of their own, each with a time limit."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_lr.processes import child_pids

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds a process may take; a quiet machine needs a tenth

LAUNCH = [sys.executable, "-m", "torchtitan_lr.launch"]

CONFIG = """
[job]
dump_folder = "{folder}"
description = "integration test"

[model]
name = "{model}"
flavor = "debug"
hf_assets_path = "torchtitan_lr/data/assets/bpe4k"

[training]
dataset = "python_stdlib"
local_batch_size = 2
seq_len = 32
steps = {steps}

[optimizer]
lr = 3e-3

[lr_scheduler]
warmup_steps = 2

[validation]
enable = true
dataset = "python_stdlib"
local_batch_size = 2
seq_len = 32
freq = {validation_freq}
steps = 2

[checkpoint]
enable = true
interval = {interval}

[metrics]
log_freq = 1
"""

# Records of these keys are a function of the configuration alone; all others tell time or memory.
_EXACT = ("loss_metrics/", "grad_norm", "lr", "n_tokens_seen", "skipped_steps")
_EXACT_VALIDATION = ("loss", "perplexity", "tokens", "unigram_entropy")

# What a user's own environment could change.
_VARIABLES = r"(NGPU|NNODES|CONFIG_FILE|LOG_RANK|COMM_MODE|TRAIN_FILE|RDZV_.*|WANDB_.*)$"


def write_config(folder, model="llama_svd", steps=30, interval=5, validation_freq=1000, extra=""):
    """Writes a small job's TOML beside its dump folder and returns its path."""
    path = folder.with_suffix(".toml")
    values = {"model": model, "steps": steps, "interval": interval}
    path.write_text(CONFIG.format(folder=folder, validation_freq=validation_freq, **values) + extra)
    return path


def environment(**variables):
    clean = {k: v for k, v in os.environ.items() if not re.match(_VARIABLES, k)}
    # No credentials, so that wandb's mode "auto" cannot go online from a developer's machine.
    return clean | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NETRC": "/nonexistent",
        **variables,
    }


class Process:
    """A started command; its output is read all the time.

    Args:
        command: What to run.
        cwd: Where.
        **variables: Added to the environment.
    """

    def __init__(self, command, cwd=ROOT, **variables):
        self._popen = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._popen.pid
        self._deadline = time.monotonic() + LIMIT
        self._texts = {}
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name):
        self._texts[name] = getattr(self._popen, name).read()

    def wait_until(self, condition, pause=0.005):
        """Waits for a condition of a running process and returns its value."""
        while True:
            value = condition()
            if value:
                return value
            if self._popen.poll() is not None:
                raise AssertionError(f"ended too early:\n{self.finish().everything}")
            self._check_time()
            time.sleep(pause)

    def send(self, number):
        self._popen.send_signal(number)

    def rank_pids(self):
        """The ranks below the launcher's torchrun."""
        return [rank for torchrun in child_pids(self.pid) for rank in child_pids(torchrun)]

    def finish(self):
        while self._popen.poll() is None:
            self._check_time()
            time.sleep(0.02)
        for reader in self._readers:
            reader.join(30)
        return Finished(self._popen.returncode, self._texts["stdout"], self._texts["stderr"])

    def _check_time(self):
        if time.monotonic() > self._deadline:
            # The launcher's ranks end with it; then the pipes close.
            self._popen.kill()
            self._popen.wait()
            for reader in self._readers:
                reader.join(30)
            raise AssertionError(f"no end within {LIMIT} s:\n{self._texts}")


class Finished:
    """What is left of a process."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    @property
    def everything(self):
        return f"status {self.status}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def own_lines(self):
        """Lines of stderr that no rank wrote."""
        return [line for line in self.err.splitlines() if not line.startswith("[rank")]


def run(command, cwd=ROOT, **variables):
    """Runs a command to its end."""
    return Process(command, cwd, **variables).finish()


def run_all(commands):
    """Runs commands two at a time.

    Args:
        commands: Arguments and environment variables by name.
    """
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(run, arguments, **variables)
            for name, (arguments, variables) in commands.items()
        }
        return {name: future.result() for name, future in started.items()}


def launch(config, *arguments, ranks=2):
    """Starts the launcher."""
    variables = {"CONFIG_FILE": str(config), "NGPU": str(ranks)}
    return Process([*LAUNCH, *arguments], **variables)


def history(folder):
    """Records of ``metrics.jsonl``; the last line may be just being written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def exact(records):
    """What two runs of the same job must have in common to every digit."""

    def is_exact(key):
        prefix, _, rest = key.rpartition("validation_metrics/")
        return rest in _EXACT_VALIDATION if prefix + rest != key else key.startswith(_EXACT)

    return [
        {key: value for key, value in record.items() if key == "step" or is_exact(key)}
        for record in records
    ]


def last_step(folder):
    return max((record["step"] for record in history(folder)), default=0)


def history_file(folder):
    """Tells one start's ``metrics.jsonl`` from another's: every start replaces the file."""
    path = folder / "metrics.jsonl"
    return path.stat().st_ino if path.is_file() else None


def step_folders(folder):
    """Steps with a checkpoint folder, mapped to whether it is complete."""
    found = (folder / "checkpoint").glob("step-*")
    return {int(path.name[5:]): (path / ".metadata").is_file() for path in found}


def complete_steps(folder):
    return {step for step, complete in step_folders(folder).items() if complete}


def freeze(pids):
    """Stops processes where they are, and waits until they are."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)
