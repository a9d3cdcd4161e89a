# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which records of a run's end replace which."""

import socket
import time

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import LOCK_FILE, locked
from torchtitan_lr.launch.run_state import (
    DIVERGED,
    FAILED,
    FINISHED,
    REFUSED,
    RUNNING,
    STOPPED,
    read_state,
    write_state,
)


@pytest.mark.parametrize("end", [FINISHED, STOPPED])
@pytest.mark.parametrize("failure", [FAILED, REFUSED, DIVERGED])
def test_a_failure_before_training_leaves_the_end_of_the_run(tmp_path, end, failure):
    write_state(tmp_path, end, "as it was")
    write_state(tmp_path, failure, "refused")
    assert (read_state(tmp_path)["state"], read_state(tmp_path)["error"]) == (end, "as it was")
    write_state(tmp_path, RUNNING)
    write_state(tmp_path, failure, "out of memory", rank=3, step=7)
    found = read_state(tmp_path)
    assert isinstance(found.pop("time"), float)
    assert found == {"state": failure, "rank": 3, "step": 7, "error": "out of memory"}


def test_the_first_failure_of_a_start_stays(tmp_path):
    write_state(tmp_path, FAILED, "of an earlier start")
    began = time.time()
    write_state(tmp_path, DIVERGED, "first", rank=1, began=began)
    write_state(tmp_path, FAILED, "connection reset", rank=0, began=began)
    assert (read_state(tmp_path)["error"], read_state(tmp_path)["rank"]) == ("first", 1)
    # But for a rank that was killed: the others saw only its end.
    write_state(tmp_path, FAILED, "rank 2 was ended by SIGKILL", rank=2)
    assert read_state(tmp_path)["rank"] == 2


def test_a_run_that_lost_its_folder_records_nothing_there(tmp_path, monkeypatch):
    from torchtitan_lr.train import record_state

    folder, began = str(tmp_path), time.time()
    with locked(folder) as signed:
        record_state(folder, signed, began, RUNNING)
        (tmp_path / LOCK_FILE).unlink()
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with locked(folder):
            record_state(folder, signed, began, FAILED, "no such luck")
            with pytest.raises(ConfigError, match=r"run.lock stays"):
                record_state(folder, signed, began, FINISHED)
        assert read_state(folder)["state"] == RUNNING
