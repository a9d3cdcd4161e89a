# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a process ends, and its children; the group of ranks is in tests/integration."""

import subprocess
import sys

import pytest

SIGNALLED = """
import os, signal, subprocess, sys, time
from types import SimpleNamespace
from torchtitan_lr.launch.processes import Signals

ranks, meeting = [], sys.argv[1] == "meeting"
agent = SimpleNamespace(meeting=meeting, restarts=True, living=lambda: ranks)
signals = Signals(lambda why: print(why, flush=True) or os._exit(128 + signals.number))
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
        ("starting", 15, ""),  # the ranks get it once they are known
    ],
)
def test_a_signal_before_the_ranks_are_known(when, status, said):
    command = [sys.executable, "-c", SIGNALLED, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (status, said), done.stderr
