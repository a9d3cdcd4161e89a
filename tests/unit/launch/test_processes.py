# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a process ends, and its children; the group of ranks is in tests/integration."""

import signal
import subprocess
import sys
import time

import pytest

from torchtitan_lr.launch.processes import SAME_SIGNAL_SECONDS

SIGNALLED = """
import os, signal, subprocess, sys, time
from types import SimpleNamespace
from torchtitan_lr.launch.processes import Signals

ranks, meeting = [], sys.argv[1] != "starting"
starts = int(sys.argv[1] == "restarting")
agent = SimpleNamespace(meeting=meeting, restarts=True, starts=starts, living=lambda: ranks)


def end(why):
    print(why, flush=True)
    raise OSError("a disk that failed")


signals = Signals(end)
signals.watch(agent)
os.kill(os.getpid(), signal.SIGTERM)
while agent.restarts or meeting:
    time.sleep(0.01)
ranks.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
agent.started()
sys.exit(-ranks[0].wait())
"""


@pytest.mark.parametrize(
    ("when", "status", "said"),
    [
        ("meeting", 143, "stopped before training began by SIGTERM\n"),
        ("restarting", 143, "stopped before training began again by SIGTERM\n"),
        ("starting", 15, ""),  # the ranks get it once they are known
    ],
)
def test_a_signal_before_the_ranks_are_known(when, status, said):
    command = [sys.executable, "-c", SIGNALLED, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (status, said), done.stderr


UNHEARD = """
import subprocess, sys
from types import SimpleNamespace
from torchtitan_lr.launch.processes import Signals

ranks = []
signals = Signals(print)
signals.watch(SimpleNamespace(meeting=False, restarts=True, living=lambda: ranks))
command = ["sh", "-c", "trap '' TERM; echo ready; read line"]
ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
sys.exit(-ranks[0].wait())
"""


def test_a_launcher_that_nobody_reads_hears_signals():
    command, pipe = [sys.executable, "-c", UNHEARD], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as launcher:
        try:
            assert launcher.stdout.readline() == "ready\n"
            launcher.stderr.close()  # as `tee` that ended, and as a terminal that hung up
            launcher.send_signal(signal.SIGHUP)
            time.sleep(1.5 * SAME_SIGNAL_SECONDS)
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) == signal.SIGKILL  # of its rank
        finally:
            launcher.kill()
