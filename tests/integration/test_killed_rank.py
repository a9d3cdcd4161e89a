# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank of a pipeline is killed in mid-run: the rest ends, and a restart leaves no trace of it."""

import signal
import sys
from types import SimpleNamespace

import pytest

from tests.integration import runs
from torchtitan_lr.launch.run_state import read_state

STEPS = 8
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The killed run, its second start, and the same job left alone."""
    base = tmp_path_factory.mktemp("killed")
    jobs = {
        name: runs.write_config(base / name, "llama_lax", STEPS, interval=4)
        for name in ("killed", "alone")
    }
    # With gloo the others notice at once; were it for this limit, the test's own would end them.
    patient = [*PIPELINE, "--comm.train_timeout_seconds=100000"]
    process = runs.launch(jobs["killed"], *patient, hold="killed:step:6")
    ranks = process.wait_for_held(2)
    runs.send_all(ranks[1:], signal.SIGKILL)
    runs.send_all(ranks[:1], signal.SIGCONT)
    killed = process.finish()
    last = runs.last_step(base / "killed")
    state = read_state(base / "killed")
    steps = runs.complete_steps(base / "killed")
    resumed = runs.launch(jobs["killed"], *PIPELINE).finish()
    alone = runs.launch(jobs["alone"], *PIPELINE).finish()
    return SimpleNamespace(**locals())


def test_the_others_end_with_one_clear_line(story):
    assert story.killed.status not in (0, 2), story.killed.everything
    assert (story.last, story.steps) == (5, {4})
    assert story.state["state"] == "failed"
    assert story.state["error"].startswith("rank 1 was ended by SIGKILL")
    runs.wait_until_gone(story.ranks)
    (line,) = story.killed.own_lines()
    assert line.startswith("error: rank 1 was ended by SIGKILL")
    checkpoint = story.base / "killed" / "checkpoint" / "step-4"
    assert line.endswith(f"run the same command again to resume from {checkpoint}")


def test_a_stopped_rank_is_not_taken_for_a_killed_one(tmp_path):
    """Rank 1 answers nobody; rank 0 gives up a collective; torchrun must kill rank 1."""
    config = runs.write_config(tmp_path / "dump", steps=STEPS)
    # The limit holds from the second step on, which nothing but this wait is part of.
    process = runs.launch(config, "--comm.train_timeout_seconds=2", hold="dump:step:2")
    ranks = process.wait_for_held(2)
    runs.send_all(ranks[:1], signal.SIGCONT)
    done = process.finish()
    runs.wait_until_gone(ranks)
    (line,) = done.own_lines()
    assert line.startswith("error: rank 0 failed: "), done.everything
    assert "imed out" in line
    assert "; rank 1 did not end on SIGTERM: stopped, or stuck; its output: " in line


def test_a_restart_resumes_to_the_same_losses(story):
    assert story.resumed.status == 0, story.resumed.everything
    assert story.alone.status == 0, story.alone.everything
    assert "Training starts at step 5\n" in story.resumed.out
    disturbed, expected = (
        runs.exact(runs.history(story.base / name)) for name in ("killed", "alone")
    )
    assert disturbed == expected
    losses = [r["loss_metrics/global_avg_loss"] for r in expected if "grad_norm" in r]
    assert len(set(losses)) == len(losses) == STEPS
