# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a process ends, and its children; the group of ranks is in tests/integration."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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


RELAY = """
import os, sys
from pathlib import Path
from torchtitan_lr.launch.processes import RankGroup

# No more than a pipe holds: without a reader it fails instead of hanging.
speak = "import sys; sys.stderr.writelines(['[rank0]:line', chr(10)] * 2000)"
group = RankGroup([sys.executable, "-c", speak], dict(os.environ), Path(sys.argv[1]), expected=1)
sys.exit(group.wait())
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("log", ["/dev/full", "/nowhere/log"])
def test_a_log_that_takes_nothing_does_not_stop_the_relay(log):
    command = [sys.executable, "-c", RELAY, log]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0
    assert done.stderr == "[rank0]:line\n" * 2000


SECOND_MACHINE = """
import os, sys
from pathlib import Path
from torchtitan_lr.launch import processes

processes.WAITING_SECONDS = 0.1
speak = '''
import sys, time
time.sleep(1.5)
for rank in (2, 3):
    started = f"process {90000 + rank} started as rank {rank} (local_rank: {rank - 2})"
    print(started, file=sys.stderr)
    print(f"[rank{rank}]:a step")
    print(f"[rank{rank}]:a warning", file=sys.stderr)
'''
command = [sys.executable, "-u", "-c", speak]
group = processes.RankGroup(
    command, dict(os.environ), Path(sys.argv[1]), expected=2, shown={0, 3}, missing="no machine"
)
status = group.wait()
print(group.local_ranks)
"""


def test_a_console_shows_ranks_by_their_number_in_the_run(tmp_path):
    command = [sys.executable, "-c", SECOND_MACHINE, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    waited, line, ranks = done.stdout.splitlines()[-3:]
    assert waited.startswith("waiting for ") and waited.endswith(" s: no machine")
    assert (line, ranks) == ("[rank3]:a step", "{2: 0, 3: 1}")
    assert done.stderr == "[rank3]:a warning\n"


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
