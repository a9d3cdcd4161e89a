# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the seed script refuses; what it writes is trained from in the tests of pipelines."""

import pytest
from scripts.make_seed_checkpoint import main

CONFIG = "train_configs/debug_lax.toml"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such.toml"], "no_such.toml"),
        ([CONFIG, "--training.stpes=3"], "training.stpes: got '3'"),
    ],
)
def test_a_wrong_job_is_told_in_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_checkpoints_are_not_joined_by_another_start(tmp_path, capsys):
    (tmp_path / "checkpoint/step-20").mkdir(parents=True)
    assert main([CONFIG, f"--job.dump_folder={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "job.dump_folder: got" in line and "has some" in line


def test_without_arguments_it_says_how(capsys):
    with pytest.raises(SystemExit) as info:
        main([])
    assert info.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "CONFIG" in told and told.count("\n") == 1
    with pytest.raises(SystemExit) as info:
        main(["--help"])
    assert info.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
