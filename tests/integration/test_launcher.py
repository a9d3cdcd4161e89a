# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher, with a small real program in place of the training (torchtitan's TRAIN_FILE)."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration import runs
from tests.integration.launches import Launch
from torchtitan_lr.launch.run_state import FAILED, STOPPED, read_state


@pytest.mark.parametrize(
    ("number", "shown"),
    [(signal.SIGTERM, "0"), (signal.SIGINT, "0,1"), (signal.SIGHUP, "1"), (signal.SIGUSR1, "0")],
)
def test_a_signal_lets_all_ranks_save_and_ends_well(tmp_path, number, shown):
    run = Launch(tmp_path, "wait", LOG_RANK=shown)
    pids = run.wait_for_ranks()
    run.send(number)
    # At once, and not at the end of a step that may take minutes.
    said = f"{number.name}: training ends its step, saves and stops; again, it is killed"
    done = run.finish()
    assert done.status == 0, done.everything
    assert run.saved() == ["saved0", "saved1"]
    runs.wait_until_gone(pids)
    assert "Traceback" not in done.err
    # The ranks' own lines and nothing else.
    lines = done.out.splitlines() + done.err.splitlines()
    assert {line[5] for line in lines if line.startswith("[rank")} == set(shown) - {","}
    assert [line for line in done.out.splitlines() if not line.startswith("[rank")] == []
    told = "stopped by SIGTERM after step 3; there is no checkpoint to resume from"  # by rank 0
    assert done.own_lines() == ([said] if "0" in shown else [said, told])


@pytest.mark.parametrize(("again", "state"), [("", FAILED), (" again", STOPPED)])
def test_a_rank_that_cannot_save_is_no_success(tmp_path, again, state):
    """The control: without a handler nothing is saved, and the launcher must not say it was."""
    run = Launch(tmp_path, "deaf", "--checkpoint.enable", MAX_RESTARTS=str(len(again[:1])))
    pids = run.wait_for_ranks()
    if again:
        for path in run.wait_for("pid"):
            path.unlink()
        runs.send_all(pids[1:], signal.SIGKILL)
        pids = run.wait_for_ranks()
    run.send(signal.SIGTERM)
    done = run.finish()
    assert done.status == 143
    assert run.saved() == []
    runs.wait_until_gone(pids)
    last = done.err.splitlines()[-1]
    assert last.startswith(f"error: stopped before training began{again} by SIGTERM; logs: ")
    assert read_state(tmp_path)["state"] == state
    assert "Traceback" not in done.err


def test_two_jobs_in_one_folder(tmp_path):
    first = Launch(tmp_path, "wait")
    first.wait_for_ranks()
    second = Launch(tmp_path, "end").finish()
    assert second.status == 2, second.everything
    (line,) = second.err.splitlines()
    assert line.startswith("error: job.dump_folder: got ") and "that no other job uses" in line
    assert f"process {first.pid} on " in line
    # It started nothing and left nothing.
    assert second.out == "" and first.saved() == []
    assert len(list((tmp_path / "logs").iterdir())) == 1
    # The lock is gone with its holder, however that ends.
    first.send(signal.SIGKILL)
    first.finish()
    third = Launch(tmp_path, "end").finish()
    assert third.status == 0, third.everything


def test_a_failing_rank(tmp_path):
    done = Launch(tmp_path, "fail").finish()
    assert done.status == 1
    last = done.err.splitlines()[-1]
    said = r"error: rank 1 failed: ValueError: no such luck; its output: (.*/attempt_0/1); there "
    folder = Path(re.match(said, last)[1])
    assert "second line" in (folder / "stderr.log").read_text()
    # Neither torchrun's own words nor those of a rank that is not shown.
    assert done.own_lines() == [last]


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
    # Before anything starts, too.
    again = runs.Process([*runs.LAUNCH, f"--job.dump_folder={small_disk}/new"]).finish()
    assert again.status == 2, again.everything
    (line,) = again.err.splitlines()
    assert line.startswith("error: job.dump_folder: got ") and "(No space left on device)" in line


def test_dry_run_is_one_process(tmp_path):
    run = Launch(tmp_path, "end", ranks=4, COMM_MODE="fake_backend", OMP_NUM_THREADS="3")
    done = run.finish()
    assert done.status == 0, done.everything
    assert "[rank0]:threads 3\n[rank0]:ready 0\n" in done.out
    assert done.out.endswith("dry run passed: one step as rank 0 of 4\n")
    # The stand-in takes the first dump folder, the trainer the last one.
    assert (tmp_path / "dry_run" / "logs").is_dir()
    assert not (tmp_path / "logs").exists()
    assert "a warning" in done.err


@pytest.mark.parametrize("rank", "01")
def test_a_refusal_by_any_rank_is_told_and_not_restarted(tmp_path, rank):
    config = "--checkpoint.enable"  # which a restart needs
    done = Launch(tmp_path, f"refuse{rank}", config, MAX_RESTARTS="3").finish()
    assert done.status == 2, done.everything
    (line,) = done.own_lines()
    assert line.startswith(f"error: rank {rank} failed: ConfigError: some.key: got 1, expected 2; ")
