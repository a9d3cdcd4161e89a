# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas on this machine, killed and started again on a schedule, and what became of them."""

import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.config.shipped import shipped_folder
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.launch.processes import end_with
from torchtitan_lr.replicas.commits import COMMITS_FILE, read_commits
from torchtitan_lr.training.figures import new_figure

END_SECONDS = 30.0
"""How long a replica may run on when another one has finished."""


@dataclass(frozen=True)
class Kill:
    """A replica that is killed and started again.

    Args:
        step: After this committed step.
        replica: Its id.
        back: Committed steps until it is started again.
    """

    step: int
    replica: int
    back: int


def read_kills(text: str, replicas: int, back: int) -> list[Kill]:
    """Read ``STEP:REPLICA,...``.

    Args:
        text: The schedule; empty for none.
        replicas: Number of replicas.
        back: Committed steps until a replica is started again.

    Raises:
        ConfigError: It is no such list.
    """
    kills = []
    for item in filter(None, text.split(",")):
        step, _, replica = item.partition(":")
        if not (step.isdecimal() and replica.isdecimal() and int(replica) < replicas):
            want = f"STEP:REPLICA,... such as 30:2, replicas 0 to {replicas - 1}"
            raise ConfigError("--kill", item, want)
        kills.append(Kill(int(step), int(replica), back))
    return sorted(kills, key=lambda kill: kill.step)


@dataclass
class Demo:
    """Processes of a demonstration.

    Args:
        arguments: The command line of a replica, without its id.
        folder: The common dump folder.
        replicas: Number of replicas.
    """

    arguments: Sequence[str]
    folder: Path
    replicas: int
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    server: subprocess.Popen[bytes] | None = None
    events: list[tuple[float, str]] = field(default_factory=list)

    def start_lighthouse(self, end: str, min_replicas: int, heartbeat_seconds: float) -> None:
        """Start the quorum server on ``end``, host:port."""
        script = shipped_folder("scripts") / "lighthouse.py"
        times = ["--heartbeat-seconds", str(heartbeat_seconds)]
        options = ["--bind", end, "--min-replicas", str(min_replicas), *times]
        self.server = self._open([str(script), *options], "lighthouse")

    def start(self, replica: int) -> None:
        """Start a replica with one thread; its output goes to its own file."""
        own = [f"--fault_tolerance.replica_id={replica}", f"--job.dump_folder={self.folder}"]
        command = ["-m", "torchtitan_lr", "train", *self.arguments, *own]
        self.processes[replica] = self._open(command, f"replica_{replica}")
        self.events.append((time.time(), f"start {replica}"))

    def _open(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        one_thread = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "NGPU": "1"}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | one_thread,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(end_with, os.getpid()),
            )

    def kill(self, replica: int) -> None:
        """Kill a replica; the kernel kills its rank with the launcher."""
        self.processes[replica].kill()
        self.processes.pop(replica).wait()
        self.events.append((time.time(), f"kill {replica}"))

    def committed(self) -> int:
        """Return the last committed step that a log has."""
        logs = self.folder.glob(f"replica_*/{COMMITS_FILE}")
        return max((log[-1]["step"] for log in map(read_commits, logs) if log), default=0)

    def run(self, kills: Sequence[Kill], limit: float) -> None:
        """Start all replicas, follow the schedule, and wait for their end.

        Args:
            kills: The schedule.
            limit: Seconds after which the demonstration has failed.

        Raises:
            RunFailedError: A replica failed, or the time is over.
        """
        begin, waiting, away = time.monotonic(), list(kills), list[Kill]()
        finished = 0.0
        for replica in range(self.replicas):
            self.start(replica)
        while self.processes:
            if time.monotonic() - begin > limit:
                raise RunFailedError(f"not finished after {limit:.0f} s; see {self.folder}/*.out")
            step = self.committed()
            if waiting and step >= waiting[0].step and waiting[0].replica in self.processes:
                away.append(waiting.pop(0))
                self.kill(away[-1].replica)
            for back in [kill for kill in away if step >= kill.step + kill.back]:
                away.remove(back)
                self.start(back.replica)
            if finished and time.monotonic() - finished > END_SECONDS:
                self.stop()  # it came when the others had finished
                self.processes.clear()
            for replica, process in list(self.processes.items()):
                if process.poll() is not None:
                    finished = finished or time.monotonic()
                    del self.processes[replica]
                    if process.returncode:
                        raise RunFailedError(f"replica {replica} failed; see {self.folder}/*.out")
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill what still runs."""
        running = list(self.processes.values())
        for process in running if self.server is None else [*running, self.server]:
            process.kill()  # nothing happens to one that has ended
            process.wait()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def changes(steps: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each step with other members than the step before.

    Args:
        steps: Records of committed steps, in order.

    Returns:
        Step, members, seconds of the step and of the median step, discarded attempts, and bytes
        that a member has sent.
    """
    usual = median(record["seconds"] for record in steps)
    rows, before = [], None
    for record in steps:
        if record["replicas"] != before:
            members = " ".join(map(str, record["replicas"]))
            seconds = f"{record['seconds']:.2f}"
            sent = f"{record['bytes_sent']:,}"
            row = [str(record["step"]), members, seconds, f"{usual:.2f}"]
            rows.append([*row, str(record["discarded"]), sent])
        before = record["replicas"]
    return rows


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return `changes` as a table."""
    header = ("step", "members", "seconds", "median", "discarded", "bytes sent")
    return text_table(header, rows, left=2)


def draw(steps: Sequence[dict[str, Any]], events: Sequence[tuple[float, str]], path: Path) -> None:
    """Draw loss, members and bytes over time.

    Args:
        steps: Records of committed steps.
        events: Time and text of starts and kills.
        path: The PNG.
    """
    begin = steps[0]["time"]
    figure = new_figure(6.6, 5.6)
    panels = figure.subplots(3, 1, sharex=True)
    seconds = [record["time"] - begin for record in steps]
    style: dict[str, Any] = {"color": "tab:blue", "linewidth": 1.2}
    panels[0].plot(seconds, [record["loss"] for record in steps], **style)
    panels[0].set_ylabel("loss\n(nats per token)")
    members = [len(record["replicas"]) for record in steps]
    panels[1].step(seconds, members, where="post", **style)
    panels[1].set_ylabel("replicas\nin the step")
    panels[1].set_ylim(0, max(members) + 0.5)
    sent = [record["bytes_sent"] / 1e6 for record in steps]
    # Dots: a line would lead through times at which nothing was sent.
    panels[2].plot(seconds, sent, ".", markersize=4, color="tab:blue")
    panels[2].set_ylabel("MB sent\nper step and replica")
    panels[2].set_ylim(0, 1.1 * max(sent))
    panels[2].set_xlabel("seconds since the first committed step")
    for at, text in events:
        if at < begin:  # the first start of a replica
            continue
        color = "tab:red" if text.startswith("kill") else "tab:green"
        for panel in panels:
            panel.axvline(at - begin, color=color, linewidth=0.8)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        panels[0].annotate(
            text, (at - begin, 1), (3, -4), rotation=90, va="top", fontsize=8, color=color, **place
        )
    for panel in panels:
        panel.grid(alpha=0.3)
    title = "replicas that are killed and start again"
    figure.suptitle(f"{title}\nred: SIGKILL, green: started again", fontsize=10)
    figure.set_layout_engine("constrained")
    figure.savefig(path)
