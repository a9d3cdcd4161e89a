# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A finished run whose command is given again, with the same settings or with others."""

import json
import shutil

import pytest

from tests.integration import runs
from torchtitan_lr.launch.run_folder import read_state

KEPT = ("job_config.json", "run_state.json", "summary.json", "metrics.jsonl")


@pytest.fixture
def again(finished, tmp_path):
    """Launches on a copy of a finished run of 6 steps; returns its end and the copy."""
    copy = tmp_path / "dump"
    shutil.copytree(finished.folder, copy)

    def launch(*arguments):
        process = runs.launch(
            finished.config,
            *("--training.steps=6", "--metrics.no_enable_wandb", f"--job.dump_folder={copy}"),
            *arguments,
        )
        return process.finish(), copy

    return launch


def contents(folder):
    files = {name: (folder / name).read_bytes() for name in KEPT}
    return files | {"logs": sorted(path.name for path in (folder / "logs").iterdir())}


def test_the_same_command_has_nothing_to_do(again, finished):
    done, copy = again()
    assert done.status == 0, done.everything
    first, *summary = done.out.splitlines()
    assert first == (
        "already at step 6 of 6: nothing to train; choose more training.steps, or another folder, "
        f"as in --job.dump_folder={copy}-2"
    )
    assert summary[0].split() == ["steps", "6"] and len(summary) == 13
    assert contents(copy) == contents(finished.folder)


def test_what_goes_on_with_other_settings_has_both_in_its_record(again):
    done, copy = again("--training.steps=7", "--optimizer.lr=1e-3")
    assert done.status == 0, done.everything
    said = "After step 6: optimizer.lr = 0.001 (was 0.003), training.steps = 7 (was 6)"
    assert done.out.count(said) == 1
    assert done.out.index(said) < done.out.index("Training starts at step 7")
    record = json.loads((copy / "job_config.json").read_text())
    assert record["optimizer"]["lr"] == 0.001
    assert record["changes"] == [
        {"after_step": 6, "training.steps": [6, 7], "optimizer.lr": [0.003, 0.001]}
    ]
    assert read_state(copy)["state"] == "finished"


def test_ranks_that_refuse_leave_a_finished_run_finished(again, tmp_path):
    """Damage is found by the ranks, after the launcher's checks."""
    (part, *_) = (tmp_path / "dump" / "checkpoint" / "step-6").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-8])
    before = {name: (tmp_path / "dump" / name).read_bytes() for name in KEPT}
    done, copy = again("--training.steps=8")
    assert done.status == 2 and "bytes instead of" in done.everything
    assert len(list((copy / "logs").iterdir())) == 2  # the ranks were started
    assert {name: (copy / name).read_bytes() for name in KEPT} == before
