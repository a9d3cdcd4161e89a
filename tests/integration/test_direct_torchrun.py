# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchrun's own use of ``torchtitan_lr.train``, and what it refuses there."""

import json
import os
import signal
import sys

import pytest

from tests.integration import runs
from tests.support.processes import free_port
from torchtitan_lr.launch.run_folder import locked

TRAIN = "torchtitan_lr.train"


def test_a_run_without_the_launcher(undisturbed):
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["steps"] == 14
    assert summary["checkpoint"] == str(undisturbed.folder / "checkpoint" / "step-14")
    assert runs.complete_steps(undisturbed.folder) == {4, 8, 12, 14}
    assert "Traceback" not in undisturbed.done.err
    # The launcher's own part is not there.
    assert not (undisturbed.folder / "logs").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_ranks_of_torchrun_itself_end_with_it(tmp_path):
    config = runs.write_config(tmp_path / "dump", steps=1_000_000, interval=1_000_000)
    command = [*runs.TORCHRUN, "-m", "torchtitan_lr", "train"]
    run = runs.Process([*command, f"--job.config_file={config}"])
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


def test_all_ranks_refuse_a_folder_where_another_job_is_at_work(tmp_path):
    config = runs.write_config(tmp_path / "dump")
    command = [sys.executable, "-m", TRAIN, f"--job.config_file={config}"]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with locked(str(tmp_path / "dump")):
        ranks = [
            runs.Process(command, RANK=rank, LOCAL_RANK=rank, **variables) for rank in ("0", "1")
        ]
        for done in [rank.finish() for rank in ranks]:
            assert done.status == 2, done.everything
            assert f"process {os.getpid()} on " in done.err.splitlines()[-1]
            assert "Traceback" not in done.err
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["run.lock"]
