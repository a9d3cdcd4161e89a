# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest

from torchtitan_lr.commands.parser import in_one_line
from torchtitan_lr.errors import ConfigError, RunFailedError


def test_refusals_and_failed_runs_become_a_status(capsys):
    def main(argv):
        raise {"refused": ConfigError("a.b", 3, "4"), "failed": RunFailedError("error: x")}[argv]

    assert in_one_line(main)("refused") == 2
    assert capsys.readouterr().err == "error: a.b: got 3, expected 4\n"
    assert in_one_line(main)("failed") == 1
    assert capsys.readouterr().err == "error: x\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "error: No space left on device"),
        (OSError(30, "Read-only file system", "/a/b"), "error: /a/b: Read-only file system"),
        (PermissionError(13, "Permission denied", "/a"), "error: /a: Permission denied"),
        (MemoryError(), "error: too little memory: the machine has no more"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "error: too little mem"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_errors_of_the_system_are_one_line(error, line, wrapped, capsys):
    @in_one_line
    def fails(argv=None):
        if not wrapped:
            raise error
        raise ValueError(f"a library's own: {error}") from error

    assert fails([]) == 1
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith(line)
