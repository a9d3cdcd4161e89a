# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whoever of launcher, torchrun and ranks is killed: the others end too."""

import signal
import sys

import pytest

from tests.integration import runs
from tests.integration.test_launcher import Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")

STATUS = {"launcher": -signal.SIGKILL, "torchrun": 1, "rank": 1}
TOLD = {"torchrun": "torchrun was ended by SIGKILL, and its ranks with it; their output: "}
TOLD |= {"rank": "rank 1 was ended by SIGKILL", "launcher": ""}


@pytest.mark.parametrize("victim", ["launcher", "torchrun", "rank"])
def test_nobody_outlives_a_killed_one(tmp_path, victim):
    """The ranks wait for ever, and no SIGTERM ends them."""
    run = Launch(tmp_path, "stubborn")
    ranks = run.wait_for_ranks()
    (torchrun,) = runs.child_pids(run.pid)
    everybody = {"launcher": run.pid, "torchrun": torchrun, "rank": ranks[1]}
    try:
        runs.send_all([everybody[victim]], signal.SIGKILL)
        done = run.finish()
        runs.wait_until_gone([torchrun, *ranks])
    finally:
        runs.send_all([torchrun, *ranks], signal.SIGKILL)
    assert done.status == STATUS[victim], done.everything
    assert any(line.startswith(f"error: {TOLD[victim]}") for line in done.err.splitlines()) == (
        victim != "launcher"
    ), done.everything


def test_ranks_of_torchrun_itself_end_with_it(tmp_path):
    config = runs.write_config(tmp_path / "dump", steps=1_000_000, interval=1_000_000)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    train = ["-m", "torchtitan_lr.train", f"--job.config_file={config}"]
    run = runs.Process([*torchrun, "--nproc_per_node=2", *train])
    run.wait_until(lambda: runs.last_step(tmp_path / "dump"))
    ranks = runs.child_pids(run.pid)
    try:
        run.send(signal.SIGKILL)
        runs.wait_until_gone(ranks)
    finally:
        runs.send_all(ranks, signal.SIGKILL)
    assert len(ranks) == 2
    run.finish()
