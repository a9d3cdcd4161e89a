# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Files that a full disk does not let be written, and output folders of commands."""

import os

import pytest

from tests.support.full_disk import files_of_at_most
from torchtitan_lr.checkpoints.folders import is_free, unfinished, write_whole
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
def test_a_command_writes_all_or_nothing(exists, tmp_path):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(KeyboardInterrupt), unfinished(out) as place:
        (place / "a").touch()
        raise KeyboardInterrupt
    assert is_free(out) and out.exists() == exists and os.listdir(tmp_path) == ["out"] * exists
    with pytest.raises(FileExistsError), unfinished(out) as place:
        (place / "a").touch()
        (out / "another's").touch()
    assert os.listdir(out) == ["another's"]
    (out / "another's").unlink()
    with unfinished(out) as place:
        (place / "folder").mkdir()
        (place / "folder/a").write_text("whole")
        # A second command is refused, and so is one after a kill.
        assert not is_free(out) and not (out / "folder").exists()
        with pytest.raises(FileExistsError), unfinished(out):
            pass
    assert os.listdir(out) == ["folder"] and (out / "folder/a").read_text() == "whole"
