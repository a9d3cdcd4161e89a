# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whole runs: processes of their own, each with a time limit."""

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.fork_server import AVAILABLE, ROOT, ForkServer
from tests.support.processes import child_pids, process_state

LIMIT = 480  # seconds a process may take before it counts as hung; a quiet machine needs ten

LAUNCH = [sys.executable, "-m", "torchtitan_lr", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FEW_GPUS = [sys.executable, "-m", "tests.integration.few_gpus"]  # as many as the file GPUS says

# Runs a command with the signals that its first argument names ignored, and no others.
RESET = """
import os, signal, sys
ignored = [int(number) for number in sys.argv[1].split(",") if number]
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""

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
shuffle = false  # neighbouring batches differ more, which controls of losses by hand need
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
_VARIABLES = r"(NGPU|NNODES|CONFIG_FILE|LOG_RANK|COMM_MODE|TRAIN_FILE|PYTHON|RDZV_.*|WANDB_.*)$"


def write_config(folder, model="llama_svd", steps=14, interval=4, validation_freq=1000, extra=""):
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
        "PYTHONFAULTHANDLER": "1",  # a process that hangs prints its stacks at SIGABRT
        **variables,
    }


@functools.cache
def fork_server():
    server = ForkServer()
    atexit.register(server.close)
    return server


class Process:
    """A started command; its output is read all the time, and it finds no signal ignored."""

    def __init__(self, command, cwd=ROOT, truly=False, ignored=(), **variables):
        command = [str(part) for part in command]
        readers, (out, err) = zip(os.pipe(), os.pipe(), strict=True)
        env = environment(**variables)
        if AVAILABLE and not truly and command[0] == sys.executable:
            self._popen = fork_server().start(command, cwd, env, out, err, ignored)
        else:
            reset = [sys.executable, "-c", RESET, ",".join(str(int(n)) for n in ignored)]
            self._popen = subprocess.Popen(
                [*reset, *command], cwd=cwd, env=env, stdout=out, stderr=err
            )
        os.close(out)
        os.close(err)
        self.pid = self._popen.pid
        self._deadline = time.monotonic() + LIMIT
        self._texts = [""] * 2
        self._readers = [
            threading.Thread(target=self._read, args=item, daemon=True)
            for item in enumerate(readers)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, index, descriptor):
        with open(descriptor, encoding="utf-8") as file:
            self._texts[index] = file.read()

    def wait_until(self, condition):
        while True:
            value = condition()
            if value:
                return value
            if self._popen.poll() is not None:
                raise AssertionError(f"ended too early:\n{self.finish().everything}")
            if time.monotonic() > self._deadline:
                self._give_up()
            time.sleep(0.005)

    def send(self, number):
        self._popen.send_signal(number)

    def rank_pids(self):
        """The ranks below the launcher, in order; process ids wrap around."""
        return sorted(child_pids(self.pid), key=rank_of)

    def wait_for_held(self, count):
        """Waits until that many ranks hold, see `tests.integration.held_train`."""

        def held():
            pids = [pid for pid in self.rank_pids() if process_state(pid) == "T"]
            return len(pids) == count and pids

        return self.wait_until(held)

    def finish(self):
        try:
            self._popen.wait(timeout=max(0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._give_up()
        for reader in self._readers:
            reader.join(LIMIT)
        return Finished(self._popen.returncode, *self._texts)

    def _give_up(self):
        """Ends the process and all below it; each prints the stacks of its threads."""
        pids = [self.pid, *child_pids(self.pid)]
        for number in (signal.SIGCONT, signal.SIGABRT):
            send_all(pids, number)
        wait_until_gone(pids[1:])
        self._popen.wait()
        for reader in self._readers:
            reader.join(30)
        raise AssertionError(f"no end within {LIMIT} s:\n{self._texts}")


def rank_of(pid):
    """The rank of a process by the folder of its output (Linux only); -1 before that is open."""
    try:
        folder = Path(os.readlink(f"/proc/{pid}/fd/2")).parent.name
    except OSError:
        return -1
    return int(folder) if folder.isdecimal() else -1


def is_pending(pid, number):
    """Whether a signal waits for a process that is stopped."""
    status = Path(f"/proc/{pid}/status").read_text()
    (pending,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


def wait_until_gone(pids):
    """Waits until processes that nobody here waits for have ended."""
    deadline = time.monotonic() + LIMIT
    while any(process_state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.005)


def send_all(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Finished:
    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    @property
    def everything(self):
        return f"status {self.status}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def own_lines(self):
        """Lines of stderr that no rank wrote.

        Left out is that a corpus is prepared: the machine's first run of it says so, and each that
        waits for that one, such as a test of another job of the suite.
        """
        others = ("[rank", "preparing", "prepared", "waiting for another run")
        return [line for line in self.err.splitlines() if not line.startswith(others)]


def run(command, cwd=ROOT, **options):
    return Process(command, cwd, **options).finish()


def launch(config, *arguments, ranks=2, hold=None):
    """Starts the launcher; its ranks stop themselves at `hold`, see `held_train`."""
    variables = {"CONFIG_FILE": str(config), "NGPU": str(ranks)}
    if hold is not None:
        variables |= holding(hold)
    return Process([*LAUNCH, *arguments], **variables)


def holding(where):
    """The variables that make ranks stop themselves there."""
    return {"TRAIN_FILE": "tests.integration.held_train", "HOLD": where}


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


def step_folders(folder):
    """Steps with a checkpoint folder, mapped to whether it is complete."""
    found = (folder / "checkpoint").glob("step-*")
    return {int(path.name[5:]): (path / "step.json").is_file() for path in found}


def complete_steps(folder):
    return {step for step, complete in step_folders(folder).items() if complete}
