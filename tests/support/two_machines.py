# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Disturb a run on two machines, and print what is lost and how long it takes to go on.

Two network namespaces are the machines, a veth pair is their link. Each has a launcher with
``NNODES=1:2`` and one rank; the first one has the rendezvous. After some steps one fault happens:

    rank     a rank of the second machine is killed
    machine  everything on the second machine is killed
    cut      the link loses every packet, and no connection is closed
    slow     the link is limited to --mbit
    join     the second machine starts only now
    store    everything on the first machine is killed

"lost" are the steps that are computed again, "ranks" and "step" are seconds from the fault to the
new start of the ranks and to the first step after it. The steps that are computed again must have
the same losses. This needs root and iproute2.


"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.namespaces import (
    ADDRESSES,
    DEVICE,
    cut,
    limit,
)
from torchtitan_lr.checkpoints.layout import complete_steps
from torchtitan_lr.launch.processes import child_pids, process_state
from torchtitan_lr.training.history import HISTORY_FILE, read_history

ROOT = Path(__file__).resolve().parents[2]

FAULTS = ("rank", "machine", "cut", "slow", "join", "store")

LOSS = "loss_metrics/global_avg_loss"

PATIENCE = 600.0
"""Seconds without progress after which a run counts as hung."""

SMALL = [
    *("--training.local_batch_size=2", "--training.global_batch_size=4", "--training.seq_len=64"),
    *("--parallelism.tensor_parallel_degree=1", "--metrics.log_freq=1", "--validation.no_enable"),
    *("--checkpoint.enable", "--metrics.no_enable_tensorboard", "--training.steps=100000"),
]

SAME = 1e-3
"""Largest relative difference of a loss that one rank computes again in place of two."""


class BrokenError(Exception):
    """A run did not go on as expected."""


@dataclass
class Machine:
    """A launcher in a namespace.

    Args:
        process: The launcher.
        console: Its output.
    """

    process: subprocess.Popen[bytes]
    console: Path

    def kill(self) -> None:
        """Kill everything: torchrun and its ranks end with the launcher."""
        below = [*child_pids(self.process.pid), *self.ranks()]
        self.process.kill()
        self.process.wait()
        while any(process_state(pid) not in ("", "Z") for pid in below):
            time.sleep(0.01)  # the kernel kills them; they may still write into the folder

    def ranks(self) -> list[int]:
        """Return the ranks' process ids."""
        return [rank for agent in child_pids(self.process.pid) for rank in child_pids(agent)]

    def restarts(self) -> int:
        """Return how often the ranks have been started again."""
        lines = self.console.read_text(errors="replace").splitlines()
        return sum(line.startswith("restart") for line in lines)


@dataclass(frozen=True)
class Outcome:
    """What a fault cost.

    Args:
        fault: One of `FAULTS`.
        lost: Steps that were computed again.
        ranks: Seconds from the fault to the new start of the ranks, None without one.
        step: Seconds from the fault to the first step after it, None if the run ended.
        then: What happened.
    """

    fault: str
    lost: int
    ranks: float | None
    step: float | None
    then: str


class Trial:
    """A run on two machines, and its fault.

    Args:
        names: The namespaces.
        folder: An empty folder.
        arguments: Arguments of both launchers.
        settings: ``RDZV_CONF``.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        arguments: Sequence[str],
        settings: str,
    ) -> None:
        self.names, self.dump = names, folder / "dump"
        self._endpoint = f"{ADDRESSES[0]}:29533"
        self._folder, self._arguments, self._settings = folder, arguments, settings
        self.machines: list[Machine] = []

    def start(self) -> None:
        """Start the launcher of the next machine."""
        name = self.names[len(self.machines)]
        console = self._folder / f"{name}.txt"
        self.machines.append(self._launch(name, console, self._arguments, self._settings))

    def _launch(self, name: str, console: Path, arguments: Sequence[str], settings: str) -> Machine:
        variables = {
            "NGPU": "1",
            "NNODES": "1:2",
            "MAX_RESTARTS": "3",
            "RDZV_ENDPOINT": self._endpoint,
            "RDZV_CONF": settings,
            "GLOO_SOCKET_IFNAME": DEVICE,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torchtitan_lr", "train", *arguments]
        with console.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *command, f"--job.dump_folder={self.dump}"],
                cwd=ROOT,
                env=os.environ | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Machine(process, console)

    def losses(self) -> dict[int, float]:
        """Return the loss of each step of the history."""
        records = read_history(self.dump / HISTORY_FILE)
        return {record["step"]: record[LOSS] for record in records if LOSS in record}

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition; return the time.

        Raises:
            BrokenError: It does not come true.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                consoles = "\n".join(m.console.read_text(errors="replace") for m in self.machines)
                raise BrokenError(f"no {what} within {PATIENCE:.0f} s:\n{consoles[-4000:]}")
            time.sleep(0.05)
        return time.monotonic()

    def disturb(self, fault: str, after: int, mbit: float) -> Outcome:
        """Start a run, cause a fault after some steps, and watch how it goes on."""
        for _ in self.names[: 1 if fault == "join" else None]:
            self.start()
        self.wait_until(lambda: max(self.losses(), default=0) >= after, f"step {after}")
        before = self.losses()
        saved = max(complete_steps(self.dump / "checkpoint"), default=0)
        begin = time.monotonic()
        if fault == "slow":
            return self._slowed(mbit)
        if fault == "join":
            self.start()
        first, second = self.machines
        if fault == "store":
            first.kill()
            ended = self.wait_until(lambda: second.process.poll() is not None, "end") - begin
            then = f"the other ends with status {second.process.returncode} after {ended:.0f} s"
            return Outcome(fault, max(before) - saved, None, None, then)
        if fault == "rank":
            os.kill(second.ranks()[0], signal.SIGKILL)
        elif fault == "machine":
            second.kill()
        elif fault == "cut":
            cut(self.names)
        started = self.wait_until(lambda: first.restarts() > 0, "restart") - begin
        if fault == "join":  # the ranks have gone on, and saved before they ended
            before, saved = self.losses(), max(complete_steps(self.dump / "checkpoint"))
        # The resumed run drops the records after its checkpoint, and writes them again.
        old = self.losses()
        stepped = self.wait_until(lambda: self.losses() not in (old, before), "step") - begin
        self.wait_until(lambda: max(self.losses(), default=0) > max(before), "later step")
        self._compare(before)
        then = "both go on" if fault in ("rank", "join") else "the first goes on alone"
        return Outcome(fault, max(before) - saved, started, stepped, then)

    def _slowed(self, mbit: float) -> Outcome:
        """Limit the link, and compare the steps' times."""
        usual = self._seconds_per_step()
        for name in self.names:
            limit(name, mbit)
        begin = time.monotonic()
        step = max(self.losses())
        stepped = self.wait_until(lambda: max(self.losses()) > step + 1, "step") - begin
        slow = self._seconds_per_step()
        then = f"{usual:.2f} s per step before, {slow:.2f} s after"
        return Outcome("slow", 0, None, stepped, then)

    def _seconds_per_step(self, steps: int = 5) -> float:
        """Return the mean time of the next steps, in seconds."""
        first = max(self.losses())
        begin = time.monotonic()
        end = self.wait_until(lambda: max(self.losses()) >= first + steps, "step")
        return (end - begin) / (max(self.losses()) - first)

    def _compare(self, before: dict[int, float]) -> None:
        after = self.losses()
        for step, loss in before.items():
            if abs(after[step] - loss) > SAME * abs(loss):
                raise BrokenError(f"step {step} had loss {loss}, and now has {after[step]}")

    def end(self) -> None:
        """Stop what is left."""
        for machine in self.machines:
            machine.kill()


def disturb(fault: str, folder: Path, names: Sequence[str], mbit: float = 20) -> Outcome:
    """Run the main job on two machines with one fault after 13 steps.

    Args:
        fault: One of `FAULTS`.
        folder: Folder of the run.
        names: The namespaces.
        mbit: Rate of the slow link, Mbit/s.

    Raises:
        BrokenError: The run did not go on as expected.
    """
    arguments = [f"--job.config_file={ROOT}/train_configs/debug_cola.toml", *SMALL]
    arguments += ["--checkpoint.interval=10", "--comm.train_timeout_seconds=30"]
    trial = Trial(names, folder, arguments, "last_call_timeout=10")
    try:
        return trial.disturb(fault, 13, mbit)
    finally:
        trial.end()
