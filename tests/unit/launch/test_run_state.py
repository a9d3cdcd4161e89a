# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Who may write into a dump folder, and which records of a run's end replace which."""

import errno
import os
import socket
import time
from pathlib import Path

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch import run_folder
from torchtitan_lr.launch.run_folder import LOCK_FILE, check_ours, check_shared, is_held, locked
from torchtitan_lr.train import record_state


def test_the_second_job_is_told_who_is_at_work(tmp_path):
    folder = str(tmp_path / "new" / "dump")
    with locked(folder), pytest.raises(ConfigError) as info, locked(folder):
        pass
    told = str(info.value)
    assert told.startswith(f"job.dump_folder: got {folder!r}, expected a folder that no other")
    assert f"process {os.getpid()} on {socket.gethostname()} has used it since 20" in told
    # What is left in the file holds nothing.
    assert not is_held(folder)
    with locked(folder):
        assert is_held(folder)


def test_a_folder_that_takes_no_lock_is_refused(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    refused = pytest.raises(ConfigError, match=r"job.dump_folder: got .*can be written")
    with refused, locked(str(tmp_path)):
        pass


def test_a_run_whose_folder_was_emptied_saves_and_records_no_more(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    folder, began = str(tmp_path), time.time()
    with locked(folder) as signed:
        record_state(folder, signed, began, run_folder.RUNNING)
        with monkeypatch.context() as patch:  # as a network does
            patch.setattr(Path, "read_bytes", fail)
            check_ours(folder, signed)
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match=r"run.lock stays"):
            check_ours(folder, signed)
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with locked(folder):
            record_state(folder, signed, began, run_folder.FAILED, "no such luck")
            with pytest.raises(ConfigError, match=r"run.lock stays"):
                record_state(folder, signed, began, run_folder.FINISHED)
        assert run_folder.read_state(folder)["state"] == run_folder.RUNNING


def test_a_machine_with_a_folder_of_its_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_SEEN_SECONDS", 0.3)
    shared, private = tmp_path / "shared", tmp_path / "private"
    with locked(str(shared)) as signed:
        (tmp_path / "mount").symlink_to(shared)
        check_shared(str(tmp_path / "mount"), signed)
        for there in (False, True):  # also where another run has been in that place
            with pytest.raises(ConfigError, match=r"that all machines share.*has another run.lock"):
                check_shared(str(private), signed)
            if not there:
                with monkeypatch.context() as patch:
                    patch.setattr(socket, "gethostname", lambda: "another")
                    with locked(str(private)):
                        pass


@pytest.mark.parametrize("end", [run_folder.FINISHED, run_folder.STOPPED])
@pytest.mark.parametrize("failure", run_folder.FAILURES)
def test_a_failure_before_training_leaves_the_end_of_the_run(tmp_path, end, failure):
    run_folder.write_state(tmp_path, end, "as it was")
    run_folder.write_state(tmp_path, failure, "refused")
    found = run_folder.read_state(tmp_path)
    assert (found["state"], found["error"]) == (end, "as it was")
    run_folder.write_state(tmp_path, run_folder.RUNNING)
    run_folder.write_state(tmp_path, failure, "out of memory", rank=3, step=7)
    found = run_folder.read_state(tmp_path)
    assert isinstance(found.pop("time"), float)
    assert found == {"state": failure, "rank": 3, "step": 7, "error": "out of memory"}


def test_the_first_failure_of_a_start_stays(tmp_path):
    run_folder.write_state(tmp_path, run_folder.FAILED, "of an earlier start")
    began = time.time()
    run_folder.write_state(tmp_path, run_folder.DIVERGED, "first", rank=1, began=began)
    run_folder.write_state(tmp_path, run_folder.FAILED, "connection reset", rank=0, began=began)
    found = run_folder.read_state(tmp_path)
    assert (found["error"], found["rank"]) == ("first", 1)
    # But for a rank that was killed: the others saw only its end.
    run_folder.write_state(tmp_path, run_folder.FAILED, "rank 2 was ended by SIGKILL", rank=2)
    assert run_folder.read_state(tmp_path)["rank"] == 2
