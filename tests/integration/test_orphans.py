# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whoever of launcher and ranks is killed: the others end too."""

import signal
import sys
import time

import pytest

from tests.integration import runs
from tests.integration.launches import Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")


def end_survivors(pids):
    """Ends ranks in the way that leaves a trace, if there are any left."""
    while any(runs.process_state(pid) not in ("", "Z") for pid in pids):
        runs.send_all(pids, signal.SIGTERM)
        time.sleep(0.005)


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_nobody_outlives_a_killed_one(tmp_path, victim):
    """The ranks wait for ever, and one SIGTERM does not end them."""
    run = Launch(tmp_path, "stubborn")
    ranks = run.wait_for_ranks()
    runs.send_all([run.pid if victim == "launcher" else ranks[1]], 9)
    done = run.finish()
    # Before a process is seen to be gone, the kernel has sent SIGKILL to those bound to it.
    end_survivors(ranks)
    # Only the launcher, when it ends the rank that is left, sends a SIGTERM first.
    asked = {path.name for path in tmp_path.glob("asked*")}
    assert asked == ({"asked0"} if victim == "rank" else set())
    assert done.status == (-signal.SIGKILL if victim == "launcher" else 1), done.everything
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == (victim == "rank")
    assert all(line.startswith("error: rank 1 was ended by SIGKILL (the kernel") for line in told)


def test_ranks_of_torchrun_itself_end_with_it(tmp_path):
    config = runs.write_config(tmp_path / "dump", steps=1_000_000, interval=1_000_000)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    train = ["-m", "torchtitan_lr.train", f"--job.config_file={config}"]
    run = runs.Process([*torchrun, "--nproc_per_node=2", *train])
    run.wait_until(lambda: runs.last_step(tmp_path / "dump"))
    ranks = runs.child_pids(run.pid)
    run.send(signal.SIGKILL)
    runs.wait_until_gone([run.pid])
    # One SIGTERM: ranks that lived on save before they end.
    runs.send_all(ranks, signal.SIGTERM)
    runs.wait_until_gone(ranks)
    assert len(ranks) == 2
    assert runs.step_folders(tmp_path / "dump") == {}
    assert "Stopped by" not in run.finish().everything
