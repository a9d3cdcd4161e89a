# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run that must not start, one that must not go on, and one that only rehearses."""

import re

from tests.integration import runs
from torchtitan_lr.launch.run_folder import read_state


def test_a_rehearsal_of_eight_ranks(tmp_path):
    folder = tmp_path / "dump"
    config = runs.write_config(folder)
    done = runs.run(
        runs.LAUNCH, CONFIG_FILE=str(config), NGPU="8", LOG_RANK="0,7", COMM_MODE="fake_backend"
    )
    assert done.status == 0, done.everything
    assert done.out.splitlines()[-1] == "dry run passed: one step as rank 0 of 8"
    assert "step 1/1  " in done.out + done.err
    assert "Traceback" not in done.out + done.err
    # Nothing that a real run would take for its own.
    assert [path.name for path in folder.iterdir()] == ["dry_run"]
    assert (folder / "dry_run" / "logs").is_dir()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    config = runs.write_config(tmp_path / "dump", interval=1)
    command = [*runs.LAUNCH, "--optimizer.lr=1e30", "--lr_scheduler.warmup_steps=0"]
    variables = {"CONFIG_FILE": str(config), "NGPU": "2"}
    # The same end would come again: it is not restarted.
    done = runs.Process(command, MAX_RESTARTS="3", **variables).finish()
    assert done.status == 3, done.everything
    assert "restart (" not in done.everything
    # With that learning rate the first step ruins the weights and the second one shows it: what
    # the first one saved is complete, and nothing to go on from.
    checkpoint = tmp_path / "dump" / "checkpoint" / "step-1"
    warned, line = done.own_lines()
    assert warned.startswith("optimizer.lr = 1e+30 is beyond ")
    # Both ranks agree on it; either may fail first.
    assert re.match(r"error: NonFiniteError: step 2: ", line)
    assert "; last good checkpoint: none;" in line
    assert (checkpoint / ".metadata").is_file()
    state = read_state(tmp_path / "dump")
    assert (state["state"], state["step"]) == ("diverged", 2) and state["rank"] in (0, 1)
    # The next start agrees with the line that this step is none to go on from.
    again = runs.Process(command, **variables).finish()
    assert again.status == 2, again.everything
    want = f"error: checkpoint: got '{checkpoint}', expected one with finite weights"
    assert again.err.splitlines()[-1].startswith(want)
    assert "Traceback" not in done.out + done.err
    assert not (tmp_path / "dump" / "summary.json").exists()
