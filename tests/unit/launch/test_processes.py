# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a process ends, and its children; the group of ranks is in tests/integration."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.kills import process_state

PROGRAM = """
import atexit, threading
from torchtitan_lr.launch.processes import exit_without_teardown

atexit.register(print, "registered")
threading.Thread(target=threading.Event().wait).start()
print("done", end=" ")
exit_without_teardown(3)
"""


def test_leaving_runs_what_is_registered_and_waits_for_no_thread():
    command = [sys.executable, "-c", PROGRAM]
    # A limit for one that hangs.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done registered\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")
def test_process_state():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(child.pid) == "T"
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) == "Z"
    assert process_state(child.pid) == ""
