# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that must not start, a run that must not go on, and one that only rehearses."""

import re

import pytest

from tests.integration import runs
from torchtitan_lr.launch.run_state import read_state

REFUSED = {
    "unknown_key": (["--training.stpes=5"], "training.stpes: got '5', expected "),
    "no_tokenizer": (["--model.hf_assets_path=/nowhere"], "model.hf_assets_path: got '/nowhere'"),
    "degree": (["--parallelism.data_parallel_shard_degree=3"], "parallelism."),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The refused ones and, as their control, the rehearsal of the same job; at the same time."""
    base = tmp_path_factory.mktemp("failures")
    commands = {}
    for name, (arguments, _) in REFUSED.items():
        config = runs.write_config(base / name)
        variables = {"CONFIG_FILE": str(config), "NGPU": "2"}
        commands[name] = ([*runs.LAUNCH, *arguments], variables)
    config = runs.write_config(base / "rehearsal")
    variables = {"CONFIG_FILE": str(config), "NGPU": "8", "COMM_MODE": "fake_backend"}
    commands["rehearsal"] = (runs.LAUNCH, variables)
    return base, runs.run_all(commands)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line_before_any_rank(started, name):
    base, done = started
    assert done[name].status == 2, done[name].everything
    assert done[name].out == ""
    (line,) = done[name].err.splitlines()
    assert line.startswith(f"error: {REFUSED[name][1]}")
    assert ", expected " in line
    assert not (base / name).exists()


def test_a_rehearsal_of_eight_ranks(started):
    base, done = started
    rehearsal = done["rehearsal"]
    assert rehearsal.status == 0, rehearsal.everything
    assert rehearsal.out.splitlines()[-1] == "dry run passed: one step as rank 0 of 8"
    assert "step 1/1  " in rehearsal.out + rehearsal.err
    assert "Traceback" not in rehearsal.out + rehearsal.err
    # What a refusal must not leave behind, an accepted job does.
    assert (base / "rehearsal" / "dry_run" / "logs").is_dir()
    # Nothing that a real run would take for its own.
    assert not (base / "rehearsal" / "checkpoint").exists()
    assert not (base / "rehearsal" / "metrics.jsonl").exists()


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
    (line,) = done.own_lines()
    # Both ranks agree on it; either may fail first.
    assert re.match(r"error: rank [01] failed: NonFiniteError: step 2: ", line)
    assert "; last good checkpoint: none;" in line
    assert (checkpoint / ".metadata").is_file()
    state = read_state(tmp_path / "dump")
    assert (state["state"], state["step"]) == ("diverged", 2) and state["rank"] in (0, 1)
    # The next start agrees with the line that this step is none to go on from.
    again = runs.Process(command, **variables).finish()
    assert again.status == 2, again.everything
    want = f"error: checkpoint: got '{checkpoint}', expected one with finite weights"
    assert again.err.startswith(want)
    assert "Traceback" not in done.out + done.err
    assert not (tmp_path / "dump" / "summary.json").exists()
