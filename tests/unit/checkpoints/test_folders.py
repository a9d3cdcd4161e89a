# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Files that a full disk does not let be written."""

import os
import resource

import pytest

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.errors import describe_error
from torchtitan_lr.training.figures import finish, new_figure


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_the_error_names_the_file_and_the_old_one_stays(tmp_path, kind):
    path = tmp_path / "result"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))  # of each file, in bytes
    try:
        with pytest.raises(OSError, match="File too large") as found:
            if kind == "text":
                write_whole(path, "new" * 1000)
            else:
                finish(new_figure(), tmp_path / "picture.png")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    named = path if kind == "text" else tmp_path / "picture.png"
    assert describe_error(found.value) == f"error: {named}: File too large"
    if kind == "text":
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["result"]
