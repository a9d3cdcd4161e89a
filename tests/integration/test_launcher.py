# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher, with a small real program in place of the training (torchtitan's TRAIN_FILE)."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration import runs
from tests.integration.launches import Launch
from torchtitan_lr.launch.run_folder import FAILED, LOST, read_state


def test_a_signal_lets_all_ranks_save_and_ends_well(tmp_path):
    run = Launch(tmp_path, "wait", LOG_RANK="1")
    pids = run.wait_for_ranks()
    run.send(signal.SIGHUP)
    done = run.finish()
    assert done.status == 0, done.everything
    assert run.saved() == ["saved0", "saved1"]
    runs.wait_until_gone(pids)
    # The shown rank's own lines, and that the signal arrived, at once and not after a step.
    lines = done.out.splitlines() + done.err.splitlines()
    assert {line[:7] for line in lines if line.startswith("[rank")} == {"[rank1]"}
    assert [line for line in done.out.splitlines() if not line.startswith("[rank")] == []
    said = "SIGHUP: training ends its step, saves and stops; again, it is killed"
    assert done.own_lines() == [said]


def test_a_rank_that_cannot_save_is_no_success(tmp_path):
    """The control: without a handler nothing is saved, and the launcher must not say it was."""
    run = Launch(tmp_path, "deaf")
    pids = run.wait_for_ranks()
    run.send(signal.SIGTERM)
    done = run.finish()
    assert done.status == 143
    assert run.saved() == []
    runs.wait_until_gone(pids)
    last = done.err.splitlines()[-1]
    assert last.startswith("error: stopped before training began by SIGTERM; logs: ")
    assert read_state(tmp_path)["state"] == FAILED
    assert "Traceback" not in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_nobody_outlives_a_killed_one(tmp_path, victim):
    """The ranks wait for ever, and one SIGTERM does not end them."""
    run = Launch(tmp_path, "stubborn")
    ranks = run.wait_for_ranks()
    if victim == "launcher":
        second = Launch(tmp_path, "wait").finish()
        assert second.status == 2 and second.out == "", second.everything
        (line,) = second.err.splitlines()
        assert line.startswith("error: job.dump_folder: got ") and "that no other job uses" in line
        assert f"process {run.pid} on " in line
        assert len(list((tmp_path / "logs").iterdir())) == 1  # it started nothing
    runs.send_all([run.pid if victim == "launcher" else ranks[1]], signal.SIGKILL)
    done = run.finish()
    # Before a process is seen to be gone, the kernel has sent SIGKILL to those bound to it.
    while any(runs.process_state(pid) not in ("", "Z") for pid in ranks):
        runs.send_all(ranks, signal.SIGTERM)  # which leaves a trace
        time.sleep(0.005)
    # Only the launcher, when it ends the rank that is left, sends a SIGTERM first.
    asked = {path.name for path in tmp_path.glob("asked*")}
    assert asked == ({"asked0"} if victim == "rank" else set())
    assert done.status == (-signal.SIGKILL if victim == "launcher" else 1), done.everything
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == (victim == "rank")
    assert all(line.startswith("error: rank 1 was ended by SIGKILL (the kernel") for line in told)


def test_a_failing_rank(tmp_path):
    done = Launch(tmp_path, "fail").finish()
    assert done.status == 1
    last = done.err.splitlines()[-1]
    said = r"error: rank 1 failed: ValueError: no such luck; its output: (.*/attempt_0/1); there "
    folder = Path(re.match(said, last)[1])
    assert "second line" in (folder / "stderr.log").read_text()
    # Neither torchrun's own words nor those of a rank that is not shown.
    assert done.own_lines() == [last]


def test_a_refusal_by_any_rank_is_told_and_not_restarted(tmp_path):
    config = "--checkpoint.enable"  # which a restart needs
    done = Launch(tmp_path, "refuse", config, MAX_RESTARTS="3").finish()
    assert done.status == 2, done.everything
    (line,) = done.own_lines()
    assert line.startswith("error: rank 1 failed: ConfigError: some.key: got 1, expected 2; ")


def test_a_machine_that_has_lost_a_gpu_starts_no_rank_again(tmp_path):
    gpus = tmp_path / "gpus"
    gpus.write_text("2")
    config = "--checkpoint.enable"  # which a restart needs
    done = Launch(tmp_path, "fail", config, MAX_RESTARTS="3", GPUS=str(gpus)).finish()
    assert done.status == 4, done.everything
    (line,) = done.own_lines()
    why = "rank 1 failed: ValueError: no such luck; NGPU: got 2, expected at most 1, the GPUs here"
    assert line.startswith(f"error: {why}")
    assert line.endswith("; there is no checkpoint to resume from")
    state = read_state(tmp_path)
    assert (state["state"], state["rank"]) == (LOST, 1) and why in state["error"]


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a disk of its own, of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_told_in_one_line(small_disk):
    done = Launch(small_disk, "full").finish()
    assert done.status == 1, done.everything
    (line,) = done.own_lines()
    assert line.startswith("error: ") and f"; no space left in {small_disk} (0.0 MiB free)" in line
    assert line.endswith("; there is no checkpoint to resume from")
