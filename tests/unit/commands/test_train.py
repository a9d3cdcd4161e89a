# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from pathlib import Path

import pytest

from tests.commands import Command
from torchtitan_lr.commands import train
from torchtitan_lr.launch import launcher, processes

FLAG = "--checkpoint.{}create_seed_checkpoint{}"


@pytest.mark.parametrize(
    ("argument", "printed"),
    [
        (FLAG.format("", ""), "seed\n"),
        (FLAG.format("", "=true"), "seed\n"),
        (FLAG.format("", "=false"), "trained\n"),
        (FLAG.format("no_", ""), "trained\n"),
        ("--job.dump_folder=create_seed_checkpoint", "trained\n"),
    ],
)
def test_only_a_flag_that_is_true_writes_a_seed_checkpoint(monkeypatch, capsys, argument, printed):
    monkeypatch.setattr(train, "make_seed_checkpoint", lambda arguments: Path("seed"))
    monkeypatch.setattr(launcher, "main", lambda arguments: print("trained"))

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(processes, "exit_without_teardown", leave)
    assert Command("train").ask(capsys, "debug_cola", argument)[1] == printed
