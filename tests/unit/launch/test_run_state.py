# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which records of a run's end replace which."""

import pytest

from torchtitan_lr.launch.run_state import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    read_state,
    write_state,
)


@pytest.mark.parametrize("end", [FINISHED, STOPPED])
def test_a_failure_before_training_leaves_the_end_of_the_run(tmp_path, end):
    write_state(tmp_path, end, "as it was")
    write_state(tmp_path, FAILED, "refused")
    assert (read_state(tmp_path)["state"], read_state(tmp_path)["why"]) == (end, "as it was")
    write_state(tmp_path, RUNNING)
    write_state(tmp_path, FAILED, "out of memory")
    assert read_state(tmp_path)["why"] == "out of memory"


def test_the_failure_of_a_new_run_is_recorded(tmp_path):
    write_state(tmp_path, FAILED, "refused")
    assert read_state(tmp_path)["state"] == FAILED
