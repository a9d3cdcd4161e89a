# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Files that a full disk does not let be written, and output folders of commands."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.support.full_disk import files_of_at_most
from torchtitan_lr.checkpoints.folders import UNFINISHED, is_free, unfinished, write_whole
from torchtitan_lr.errors import describe_error
from torchtitan_lr.training.figures import finish, new_figure


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_the_error_names_the_file_and_the_old_one_stays(tmp_path, kind):
    path = tmp_path / "result.png"
    path.write_text("old")
    with files_of_at_most(256), pytest.raises(OSError, match="File too large") as found:
        if kind == "text":
            write_whole(path, "new" * 1000)
        else:
            finish(new_figure(), path)
    assert describe_error(found.value) == f"error: {path}: File too large"
    if kind == "text":
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["result.png"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_second_command_leaves_what_the_first_writes(exists, tmp_path):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with unfinished(out) as first:
        (first / "a").write_text("whole")
        with pytest.raises(BlockingIOError, match="another command is writing"), unfinished(out):
            pass
    assert os.listdir(tmp_path) == ["out"] and os.listdir(out) == ["a"]
    with pytest.raises(OSError, match="not empty"), unfinished(out) as second:
        (second / "a").write_text("another")
    assert os.listdir(out) == ["a"] and (out / "a").read_text() == "whole"


def write_two(out, changes):
    """Write as a command does, in a process of its own that dies after so many last changes."""

    def dying(change):
        def call(*arguments):
            return change(*arguments) if next(left, None) else os.kill(os.getpid(), signal.SIGKILL)

        return call

    left = iter([True] * changes)
    Path.rename, Path.unlink = dying(Path.rename), dying(Path.unlink)
    with unfinished(out) as place:
        (place / "folder").mkdir()
        for name in ("a", "folder/b"):
            (place / name).write_text("written")


@pytest.mark.parametrize(
    ("exists", "changes"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)]
)
def test_a_killed_command_leaves_all_or_what_the_next_one_deletes(exists, changes, tmp_path):
    out, needed = tmp_path / "out", 2 if exists else 1
    if exists:
        out.mkdir()
    child = multiprocessing.get_context("fork").Process(target=write_two, args=(out, changes))
    child.start()
    child.join()
    assert child.exitcode == (0 if changes == needed else -signal.SIGKILL)
    if changes == needed:
        assert {*os.listdir(out)} == {"a", "folder"} and (out / "folder/b").read_text()
    elif changes:  # an existing folder is filled name by name: a kill between two is told apart
        assert not is_free(out) and UNFINISHED in os.listdir(out)
    else:
        with unfinished(out) as place:
            (place / "c").touch()
        assert os.listdir(out) == ["c"] and os.listdir(tmp_path) == ["out"]
