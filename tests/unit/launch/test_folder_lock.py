# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Who may write into a dump folder; two real launches are in tests/integration/test_launcher.py."""

import os
import socket
from pathlib import Path

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch import folder_lock
from torchtitan_lr.launch.folder_lock import (
    HELD_VARIABLE,
    LOCK_FILE,
    SIGNATURE_VARIABLE,
    locked,
    locked_by_rank,
)


def test_the_second_job_is_told_who_is_at_work(tmp_path):
    folder = str(tmp_path / "new" / "dump")
    with locked(folder), pytest.raises(ConfigError) as info, locked(folder):
        pass
    told = str(info.value)
    assert told.startswith(f"job.dump_folder: got {folder!r}, expected a folder that no other")
    assert f"process {os.getpid()} on {socket.gethostname()} has used it since 20" in told
    # What is left in the file holds nothing.
    with locked(folder):
        pass


@pytest.mark.parametrize("blocked", ["dump", f"dump/{LOCK_FILE}"])
def test_a_folder_that_takes_no_lock_is_refused(tmp_path, blocked):
    path = tmp_path / blocked
    if blocked == "dump":
        path.write_text("")
    else:
        path.mkdir(parents=True)
    refused = pytest.raises(ConfigError, match=r"job.dump_folder: got .*can be written")
    with refused, locked(str(tmp_path / "dump")):
        pass


@pytest.mark.parametrize(
    ("variables", "takes"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False)],
)
def test_rank_0_locks(tmp_path, variables, takes):
    with locked_by_rank(str(tmp_path), variables):
        assert (tmp_path / LOCK_FILE).exists() == takes


def test_a_rank_relies_on_its_launcher_for_that_folder_only(tmp_path):
    folder = str(tmp_path / "dump")
    with locked(folder) as lock:
        with locked_by_rank(folder, variables_of(lock)) as still_ours:
            still_ours()
        other = {"RANK": "0", HELD_VARIABLE: str(tmp_path)}
        with pytest.raises(ConfigError), locked_by_rank(folder, other):
            pass


def variables_of(lock):
    held = {HELD_VARIABLE: os.path.realpath(lock.dump_folder)}
    return held | {"RANK": "0", SIGNATURE_VARIABLE: lock.signature}


def test_a_run_whose_lock_was_deleted_writes_no_more(tmp_path, monkeypatch):
    folder = str(tmp_path)
    with locked(folder) as lock, locked_by_rank(folder, variables_of(lock)) as still_ours:
        Path(folder, LOCK_FILE).unlink()
        for check in (lock, still_ours):
            with pytest.raises(ConfigError, match=r"run.lock stays: it was deleted"):
                check()
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with locked(folder) as second:
            second()
            with pytest.raises(ConfigError, match="on another has used it"):
                still_ours()


def test_a_later_start_stops_the_saves_of_an_earlier_one(tmp_path, monkeypatch):
    """As on NFS without locks between machines: both get the lock, and the last one signs."""
    monkeypatch.setattr(folder_lock, "lock_file", lambda *_: None)
    variables = {"RANK": "0"}
    with locked_by_rank(str(tmp_path), variables) as first:
        first()
        monkeypatch.setattr(socket, "gethostname", lambda: "other")
        with locked_by_rank(str(tmp_path), variables) as second:
            second()
            with pytest.raises(ConfigError, match=r"no other job uses; process \d+ on other has"):
                first()
        # The other's end gives nothing back: its checkpoints are newer.
        with pytest.raises(ConfigError):
            first()
    with locked_by_rank(str(tmp_path), {"RANK": "1"}) as other_rank:
        other_rank()
