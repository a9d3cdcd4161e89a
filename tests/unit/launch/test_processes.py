# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a launcher ends, and its children; the group of ranks is in tests/integration."""

import signal
import subprocess
import sys
import time

from torchtitan_lr.launch.processes import SAME_SIGNAL_SECONDS

MEETING = """
import os, signal, time
from types import SimpleNamespace
from torchtitan_lr.launch.processes import Signals

def end(why):
    print(why, flush=True)
    raise OSError("a disk that failed")

signals = Signals(end)
signals.agent = SimpleNamespace(meeting=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""


def test_a_signal_while_no_rank_runs_ends_the_launcher():
    done = subprocess.run([sys.executable, "-c", MEETING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "stopped before training began by SIGTERM\n")


UNHEARD = """
import subprocess, sys
from types import SimpleNamespace
from torchtitan_lr.launch.processes import Signals

ranks = []
signals = Signals(print)
signals.agent = SimpleNamespace(meeting=False, restarts=True, living=lambda: ranks)
wait = "i=0; while [ $i -lt 600 ]; do sleep .1; i=$((i+1)); done"
command = ["sh", "-c", f"trap 'echo asked' TERM; echo ready; {wait}"]
ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
print("ready", flush=True)
sys.exit(-ranks[0].wait())
"""


def test_a_launcher_that_nobody_reads_hears_signals():
    """SIGHUP asks as SIGTERM, a notice changes nothing any more, and another signal kills."""
    command, pipe = [sys.executable, "-c", UNHEARD], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as launcher:
        try:
            said = launcher.stdout.readline() + launcher.stdout.readline()
            assert sorted(said) == sorted("ready\n" * 2)  # of two processes, into one pipe
            launcher.stderr.close()  # as `tee` that ended, and as a terminal that hung up
            launcher.send_signal(signal.SIGHUP)
            assert launcher.stdout.readline() == "asked\n"
            time.sleep(1.5 * SAME_SIGNAL_SECONDS)
            launcher.send_signal(signal.SIGUSR1)
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) == signal.SIGKILL  # of its rank
        finally:
            launcher.kill()
