# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchrun's own use of ``torchtitan_lr.train``, and what it refuses there."""

import json
import os
import socket
import sys

from tests.integration import runs
from torchtitan_lr.launch.folder_lock import locked


def test_a_run_without_the_launcher(undisturbed):
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["steps"] == 14
    assert summary["checkpoint"] == str(undisturbed.folder / "checkpoint" / "step-14")
    assert runs.complete_steps(undisturbed.folder) == {4, 8, 12, 14}
    assert "Traceback" not in undisturbed.done.err
    # The launcher's own part is not there.
    assert not (undisturbed.folder / "logs").exists()


def test_a_rank_refuses_in_one_line_too(tmp_path):
    config = runs.write_config(tmp_path / "dump")
    command = [sys.executable, "-m", "torchtitan_lr.train", f"--job.config_file={config}"]
    # Not rank 0: the first that fails ends the others, so each says it.
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    # Refused before any port is opened: this one cannot be.
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = runs.run([*command, "--training.seq_len=0"], **variables)
    assert done.status == 2, done.everything
    assert [line for line in done.err.splitlines() if line.startswith("error: ")] == [
        done.err.splitlines()[-1]
    ]
    assert done.err.splitlines()[-1].startswith("error: training.seq_len: got 0, expected ")
    assert "Traceback" not in done.err
    assert not (tmp_path / "dump").exists()


def test_train_is_a_rank_under_torchrun():
    """Without torchrun's other variables the rank itself refuses, not the launcher."""
    variables = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": ""}
    done = runs.run([*runs.LAUNCH, "debug_cola"], **variables)
    assert done.status == 2, done.everything
    assert done.err.splitlines()[-1].startswith("error: WORLD_SIZE: got '', expected what torch")


def test_all_ranks_refuse_a_folder_where_another_job_is_at_work(tmp_path):
    config = runs.write_config(tmp_path / "dump")
    command = [sys.executable, "-m", "torchtitan_lr.train", f"--job.config_file={config}"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with locked(str(tmp_path / "dump")):
        ranks = [
            runs.Process(command, RANK=rank, LOCAL_RANK=rank, **variables) for rank in ("0", "1")
        ]
        for done in [rank.finish() for rank in ranks]:
            assert done.status == 2, done.everything
            assert f"process {os.getpid()} on " in done.err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["run.lock"]
