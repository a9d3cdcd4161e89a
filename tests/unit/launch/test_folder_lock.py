# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Who may write into a dump folder; two real launches are in tests/integration/test_launcher.py."""

import os
import socket

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import (
    HELD_VARIABLE,
    LOCK_FILE,
    locked,
    locked_by_rank,
    still_ours,
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


def test_a_rank_relies_on_its_launcher_for_that_folder_only(tmp_path, monkeypatch):
    folder = str(tmp_path / "dump")
    with locked(folder):
        monkeypatch.setenv(HELD_VARIABLE, os.path.realpath(folder))
        with locked_by_rank(folder):
            pass
        monkeypatch.setenv(HELD_VARIABLE, str(tmp_path))
        with pytest.raises(ConfigError), locked_by_rank(folder):
            pass


def test_a_run_whose_folder_was_emptied_saves_no_more(tmp_path, monkeypatch):
    with locked(str(tmp_path)):
        check = still_ours(str(tmp_path))
        check()
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match=r"run.lock stays"):
            check()
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with locked(str(tmp_path)), pytest.raises(ConfigError, match=r"run.lock stays"):
            check()
