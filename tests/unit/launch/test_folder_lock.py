# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Who may write into a dump folder; two real launches are in tests/integration/test_launcher.py."""

import errno
import os
import socket
from pathlib import Path

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import LOCK_FILE, check_ours, locked


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


def test_a_run_whose_folder_was_emptied_saves_no_more(tmp_path, monkeypatch):
    folder = str(tmp_path)
    with locked(folder) as signed:
        check_ours(folder, signed)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", fail_as_a_network_does)
            check_ours(folder, signed)
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match=r"run.lock stays"):
            check_ours(folder, signed)
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with locked(folder), pytest.raises(ConfigError, match=r"run.lock stays"):
            check_ours(folder, signed)


def fail_as_a_network_does(path):
    raise OSError(errno.ESTALE, "Stale file handle")
