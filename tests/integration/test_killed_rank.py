# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank of a pipeline is killed in mid-run: the rest ends, and a restart leaves no trace of it."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from tests.integration import runs

STEPS = 14
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
    process = runs.launch(jobs["killed"], *PIPELINE)
    process.wait_until(lambda: runs.last_step(base / "killed") >= 6)
    process.wait_until(lambda: 4 in runs.complete_steps(base / "killed"))
    victim = process.rank_pids()[1]
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    killed = process.finish()
    seconds = time.monotonic() - begin
    last = runs.last_step(base / "killed")
    steps = runs.complete_steps(base / "killed")
    resumed = runs.launch(jobs["killed"], *PIPELINE).finish()
    alone = runs.launch(jobs["alone"], *PIPELINE).finish()
    return SimpleNamespace(**locals())


def test_the_others_end_with_one_clear_line(story):
    assert story.killed.status not in (0, 2), story.killed.everything
    assert story.last < STEPS
    # comm.train_timeout_seconds; with gloo they notice at once.
    assert story.seconds < 60
    (line,) = story.killed.own_lines()
    assert line.startswith("error: rank 1 was ended by SIGKILL")
    checkpoint = story.base / "killed" / "checkpoint" / f"step-{max(story.steps)}"
    assert line.endswith(f"run the same command again to resume from {checkpoint}")


def test_a_restart_resumes_to_the_same_losses(story):
    assert story.resumed.status == 0, story.resumed.everything
    assert story.alone.status == 0, story.alone.everything
    assert f"Training starts at step {max(story.steps) + 1}\n" in story.resumed.out
    disturbed, expected = (
        runs.exact(runs.history(story.base / name)) for name in ("killed", "alone")
    )
    assert disturbed == expected
    losses = [r["loss_metrics/global_avg_loss"] for r in expected if "grad_norm" in r]
    assert len(set(losses)) == len(losses) == STEPS
