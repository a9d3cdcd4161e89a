# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas and their quorum server as processes of this machine, forked with all imports done."""

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.forked_runs import ForkedRun
from tests.support.namespaces import DEVICE
from torchtitan_lr.config.fault_tolerance import private_folder
from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.launch.processes import end_with
from torchtitan_lr.replicas.commits import COMMITS_FILE

_POLL_SECONDS = 0.02
_PRELOADED = ("tests.support.faults.strikes", "tests.support.forked_runs")


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Place:
    """Where a replica runs.

    Attributes:
        address: Its address.
        namespace: Its network namespace; empty for that of the check.
    """

    address: str = "127.0.0.1"
    namespace: str = ""


@dataclass(frozen=True)
class Setting:
    """What all replicas of a check have in common.

    Attributes:
        config: The parsed configuration of one of them.
        arguments: Its command line, without id, address and quorum server.
        folder: The common dump folder.
        places: Where each replica runs; the quorum server is with the first.
        pause: Seconds added to every step.
        heartbeat_seconds: Of the quorum server.
        patience: Seconds without what is waited for, after which the check has failed.
    """

    config: Any
    arguments: Sequence[str]
    folder: Path
    places: Sequence[Place]
    pause: float = 0.1
    heartbeat_seconds: float = 2.0
    patience: float = 300.0

    @property
    def interval(self) -> int:
        """Steps between refreshes of the bases."""
        return int(self.config.optimizer.tsr_refresh_interval)


class Fleet:
    """Processes of a check.

    Args:
        setting: What they have in common.

    Attributes:
        setting: The same.
        orders: Folder of orders and notes.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.orders = setting.folder / "orders"
        self.orders.mkdir(parents=True)
        self._port = free_port()
        self._server: Any = None
        self._runs: dict[int, ForkedRun] = {}
        self._starts = 0
        self._logs = [_Log(self._folder(replica)) for replica in range(len(setting.places))]

    def start_lighthouse(self) -> None:
        """Start the quorum server; again on the same port after `stop_lighthouse`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        setting, place = self.setting, self.setting.places[0]
        least = setting.config.fault_tolerance.min_replica_size
        bind = f"{place.address}:{self._port}"
        arguments = (bind, least, setting.heartbeat_seconds, place.namespace)
        self._server = context.Process(target=_serve, args=arguments)
        self._server.start()

    def stop_lighthouse(self) -> None:
        """Kill the quorum server."""
        self._server.kill()
        self._server.join()

    def start(self, replica: int, heal_pause: float = 0.0) -> None:
        """Start a replica.

        Args:
            replica: Its id.
            heal_pause: Seconds that its heals take longer.
        """
        from tests.support.faults.strikes import Arms  # late: it needs torchft

        setting, place = self.setting, self.setting.places[replica]
        self._starts += 1
        arms = Arms(
            self.orders,
            replica,
            setting.interval,
            setting.pause,
            heal_pause,
            place.namespace,
            DEVICE if place.namespace else "",
        )
        own = [
            f"--job.dump_folder={setting.folder}",
            f"--fault_tolerance.replica_id={replica}",
            f"--fault_tolerance.address={place.address}",
            f"--fault_tolerance.lighthouse={setting.places[0].address}:{self._port}",
        ]
        console = setting.folder / f"start-{self._starts}-of-{replica}"
        self._runs[replica] = ForkedRun([*setting.arguments, *own], console, 1, 1, arms)

    def kill(self, replica: int) -> None:
        """Kill a replica, or note that it has ended by itself."""
        self._runs.pop(replica).kill()

    def send_signal(self, replica: int, number: int) -> None:
        """Send a signal to a replica."""
        self._runs[replica].send_signal(number)

    def stop(self) -> None:
        """Kill everything."""
        for replica in list(self._runs):
            self.kill(replica)
        if self._server is not None:
            self.stop_lighthouse()

    def commits(self) -> list[dict[str, Any]]:
        """Return the earliest record of every committed step so far, in order."""
        steps: dict[int, dict[str, Any]] = {}
        for record in (record for log in self._logs for record in log.read()):
            known = steps.setdefault(record["step"], record)
            if record["time"] < known["time"]:
                steps[record["step"]] = record
        return [steps[step] for step in sorted(steps)]

    def last(self) -> dict[str, Any]:
        """Return the record of the last committed step; step 0 before the first."""
        logs = [log.read() for log in self._logs]
        newest = [records[-1] for records in logs if records]
        return max(newest, key=lambda record: record["step"], default={"step": 0, "replicas": []})

    def is_full(self) -> bool:
        """Return whether all replicas took part in the last step."""
        return len(self.last()["replicas"]) == len(self.setting.places)

    def wait(self, condition: Callable[[], bool], what: str, alive: Sequence[int] = ()) -> float:
        """Wait for a condition; return the time.

        Args:
            condition: It.
            what: Its name in an error.
            alive: Replicas that must not end meanwhile.

        Raises:
            RunFailedError: It does not come true in time, or a replica has ended.
        """
        deadline = time.monotonic() + self.setting.patience
        while not condition():
            ended = [replica for replica in alive if self._runs[replica].ended()]
            if ended or time.monotonic() > deadline:
                why = f"replicas {ended} have ended" if ended else f"{self.setting.patience:.0f} s"
                raise RunFailedError(f"no {what} ({why}); see {self.setting.folder}/start-*")
            time.sleep(_POLL_SECONDS)
        return time.time()

    def wait_full(self) -> float:
        """Wait until all replicas take part in a step."""
        return self.wait(self.is_full, "step with all replicas", sorted(self._runs))

    def wait_steps(self, number: int, alive: Sequence[int] = ()) -> float:
        """Wait for so many further committed steps."""
        end = self.last()["step"] + number
        return self.wait(lambda: self.last()["step"] >= end, f"step {end}", alive)

    def _folder(self, replica: int) -> Path:
        section = self.setting.config.fault_tolerance
        section.replica_id = replica
        self.setting.config.job.dump_folder = str(self.setting.folder)
        return private_folder(self.setting.config)


@dataclass
class _Log:
    """The growing log of a replica's commits, in a folder."""

    folder: Path
    _records: list[dict[str, Any]] = field(default_factory=list)
    _at: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all records so far; a line that is not complete waits for its end."""
        path = self.folder / COMMITS_FILE
        if not path.is_file() or path.stat().st_size == self._at:
            return self._records
        with path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        self._records += [json.loads(line) for line in whole.splitlines()]
        return self._records


def _serve(bind: str, least: int, heartbeat_seconds: float, namespace: str) -> None:
    """Run a quorum server until it is killed."""
    end_with(os.getppid())
    from tests.support.faults.strikes import enter
    from tests.support.lighthouse import JOIN_SECONDS, lighthouse

    if namespace:
        enter(namespace)
    with lighthouse(bind, least, JOIN_SECONDS, heartbeat_seconds):
        while True:
            time.sleep(3600)
