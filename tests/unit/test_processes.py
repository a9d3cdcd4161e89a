# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a process ends; the group of ranks is in test_launch.py and tests/integration."""

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from torchtitan_lr.processes import leave

atexit.register(print, "registered")
threading.Thread(target=time.sleep, args=(600,)).start()
print("done", end=" ")
leave(3)
"""


def test_leaving_runs_what_is_registered_and_waits_for_no_thread():
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done registered\n", "")
