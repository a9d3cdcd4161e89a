# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A real Slurm of two nodes on this machine, with its own ports, keys and folders.

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge, whose slurmd is built
for several nodes per machine. Nothing outside its folder is read or written.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.integration.runs import LIMIT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")

CONFIG = """
ClusterName=two
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for the lifetime of credentials.
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/linear
# The control daemon looks at its nodes every third of this time.
SlurmdTimeout=15
SlurmctldTimeout=60
MessageTimeout=60
KillWait=10
ReturnToService=2
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"


def why_not():
    """Why no cluster can run here, empty if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)})"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def free_ports(count):
    with ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in found]


class Cluster:
    """A running cluster."""

    def __init__(self, folder):
        self.folder = folder
        controller, *ports = free_ports(3)
        nodes = [NODE.format(name=f"n{i}", port=port) for i, port in enumerate(ports, 1)]
        config = CONFIG.format(controller=controller, folder=folder, nodes="\n".join(nodes))
        for name in ("munge", "state", "spool-n1", "spool-n2"):
            (folder / name).mkdir(mode=0o755)
        (folder / "slurm.conf").write_text(config)
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = {}

    def start(self):
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        options = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={munge / name}" for option, name in options.items()]
        self._daemon("munged", ["munged", "-F", "--force", f"--socket={munge}/socket", *files])
        self.wait_until((munge / "socket").exists, "munged")
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for name in ("n1", "n2"):
            self.start_node(name)
        self.wait_until(lambda: self.query("sinfo", "-h", "-o", "%T") == "idle", "idle nodes")

    def start_node(self, name):
        self._daemon(name, ["slurmd", "-D", "-N", name])

    def _daemon(self, name, command):
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def kill_node(self, name):
        """Kills a node's daemon and all that it started, as a loss of power would."""
        tasks = self._tasks(name)
        keepers = {parent for task in tasks if (parent := keeper_of(task))}
        for pid in [self.daemons[name].pid, *keepers, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[name].wait()
        # Else the daemon finds its old steps when it starts again.
        shutil.rmtree(self.folder / f"spool-{name}")
        (self.folder / f"spool-{name}").mkdir(mode=0o755)

    def _tasks(self, name):
        """Processes of jobs on a node."""
        variables = {"SLURMD_NODENAME": name, "SLURM_CONF": self.env["SLURM_CONF"]}
        marks = {f"{key}={value}".encode() for key, value in variables.items()}
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if marks <= set(Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")):
                    found.append(int(entry))
        return found

    def stop(self):
        for name in [name for name in ("n1", "n2") if name in self.daemons]:
            if self.daemons[name].poll() is None:
                self.kill_node(name)
        for name in ("slurmctld", "munged"):
            if name in self.daemons:
                self.daemons[name].kill()
                self.daemons[name].wait()

    def query(self, *command):
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def submit(self, *arguments, **variables):
        """Submits a job and returns its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *map(str, arguments)],
            env=self.env | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job):
        return self.query("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def wait_until(self, condition, what):
        deadline = time.monotonic() + LIMIT
        while not (value := condition()):
            for name, daemon in self.daemons.items():
                log = self.folder / f"{name}.out"
                assert daemon.poll() is None or name[0] == "n", f"{name}: {log.read_text()}"
            assert time.monotonic() < deadline, f"no {what} within {LIMIT} s"
            time.sleep(0.05)
        return value


def keeper_of(pid):
    """The slurmstepd that started a task, None for a process below it."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
            return parent
    return None


@contextmanager
def cluster(folder):
    """Runs a cluster in an empty folder."""
    slurm = Cluster(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
