# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One job that is stopped three times, against the same job left alone.

SIGTERM, two signals, a kill in mid-save: each stage starts the same command again, and at
the end there must be no trace of them in the numbers. The ranks hold where they are disturbed.
"""

import json
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from tests.integration import runs
from tests.support.processes import process_state
from torchtitan_lr.launch.processes import SAME_SIGNAL_SECONDS
from torchtitan_lr.launch.run_folder import read_state

STEPS = 14  # checkpoints at 4, 8, 12 and the last

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches ranks by /proc")


class Life:
    """The stages of one job; each runs once, after those before it."""

    def __init__(self, folder):
        self.folder = folder
        self.config = runs.write_config(folder, steps=STEPS, interval=4)
        self._stages = {}
        self.broken = ""

    def stage(self, name):
        for stage in ("sigterm", "twice", "killed", "rest"):
            if stage not in self._stages:
                assert not self.broken, f"stage {self.broken} went wrong"
                self.broken = stage
                self._stages[stage] = self._live(stage)
                self.broken = ""
            if stage == name:
                return self._stages[stage]
        raise KeyError(name)

    def _live(self, name):
        hold = {"sigterm": "step:3", "twice": "step:9", "killed": "saving:12", "rest": "step:14"}
        before = max(runs.complete_steps(self.folder), default=0)
        process = runs.launch(self.config, hold=f"{self.folder.name}:{hold[name]}")
        try:
            extra = getattr(self, f"_{name}")(process)
            done = process.finish()
        except BaseException:
            process.send(signal.SIGKILL)
            raise
        return SimpleNamespace(
            state=read_state(self.folder),
            before=before,
            done=done,
            folders=runs.step_folders(self.folder),
            last=runs.last_step(self.folder),
            summary=(self.folder / "summary.json").exists(),
            **extra,
        )

    def _sigterm(self, process):
        pids = process.wait_for_held(2)
        process.send(signal.SIGTERM)
        self._wait_until_asked(process, pids)
        runs.send_all(pids, signal.SIGCONT)
        return {}

    def _twice(self, process):
        pids = process.wait_for_held(2)
        process.send(signal.SIGTERM)
        self._wait_until_asked(process, pids)
        process.send(signal.SIGTERM)  # as `timeout` does: the same signal once more
        time.sleep(2 * SAME_SIGNAL_SECONDS)
        assert [*map(process_state, pids)] == ["T", "T"]
        process.send(signal.SIGTERM)
        return {"pids": pids}

    def _wait_until_asked(self, process, pids):
        process.wait_until(lambda: all(runs.is_pending(pid, signal.SIGTERM) for pid in pids))

    def _killed(self, process):
        """SIGKILL for all ranks while a save is under way: a folder is there, its end is not."""
        process.wait_for_held(1)
        pids = process.rank_pids()
        runs.send_all(pids, signal.SIGKILL)
        return {"pids": pids}

    _rest = _sigterm  # in the last step: there is nothing left to stop


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    return Life(tmp_path_factory.mktemp("life") / "dump")


def test_a_signal_saves_that_very_step(life):
    stage, step = life.stage("sigterm"), 3
    assert stage.done.status == 0, stage.done.everything
    assert stage.last == step  # that the signal met
    why = f"SIGTERM after step {step}"
    assert (stage.state["state"], stage.state["error"]) == ("stopped", why)
    assert stage.folders[step]  # complete
    checkpoint = life.folder / "checkpoint" / f"step-{step}"
    stops = [line for line in (stage.done.out + stage.done.err).splitlines() if "resume" in line]
    assert len(stops) == 1, stops
    assert stops[0].endswith(
        f"Stopped by SIGTERM after step {step} of {STEPS}, checkpoint {checkpoint}: "
        "run the same command again to resume"
    )
    assert "Traceback" not in stage.done.out + stage.done.err
    (line,) = stage.done.own_lines()
    assert ": training ends its step, saves and stops" in line
    # An unfinished run has no summary to be taken for a finished one's.
    assert not stage.summary


def test_the_next_start_goes_on_from_there(life):
    first, second = life.stage("sigterm"), life.stage("twice")
    assert first.before == 0 and "Training starts at step 1\n" in first.done.out
    assert second.before == first.last
    assert f"Training starts at step {first.last + 1}\n" in second.done.out


def test_a_second_signal_kills(life):
    stage = life.stage("twice")
    assert stage.done.status == 128 + signal.SIGTERM, stage.done.everything
    (said, line) = stage.done.own_lines()
    assert said.startswith("SIGTERM: training ends its step")
    assert line.startswith("error: killed by SIGTERM; logs: ")
    assert (stage.state["state"], stage.state["error"]) == ("failed", "killed by SIGTERM")
    assert "Traceback" not in stage.done.out + stage.done.err
    runs.wait_until_gone(stage.pids)
    assert stage.folders.keys() == {3, 4, 8} and stage.last == 8  # nothing of step 9


def test_a_kill_in_mid_save_leaves_nothing_to_trust(life):
    stage = life.stage("killed")
    assert stage.done.status not in (0, 2), stage.done.everything
    (line,) = stage.done.own_lines()
    assert line.startswith("error: ") and "logs" in line
    assert len(stage.pids) == 2
    runs.wait_until_gone(stage.pids)
    # The folder is there and newer than every checkpoint, but no script takes it for one.
    assert stage.folders == {3: True, 4: True, 8: True, 12: False}


def test_the_start_after_it_takes_the_last_complete_checkpoint(life):
    rest = life.stage("rest")
    assert rest.done.status == 0, rest.done.everything
    assert "checkpoint/step-8." in rest.done.out
    assert "Training starts at step 9\n" in rest.done.out
    assert rest.last == STEPS
    # That step is saved again over what was torn.
    assert rest.folders[12]


def test_a_signal_in_the_last_step_stops_nothing(life):
    rest = life.stage("rest")
    assert rest.folders[STEPS] and "Stopped by" not in rest.done.everything
    assert json.loads((life.folder / "summary.json").read_text())["steps"] == STEPS


def test_no_digit_differs_from_the_undisturbed_run(life, undisturbed):
    life.stage("rest")
    disturbed, expected = (runs.exact(runs.history(f)) for f in (life.folder, undisturbed.folder))
    assert disturbed == expected
    # The comparison sees every step and its losses, and no two steps are alike.
    losses = [r["loss_metrics/global_avg_loss"] for r in expected if "grad_norm" in r]
    assert len(set(losses)) == len(losses) == STEPS
    assert [r["step"] for r in expected if "validation_metrics/loss" in r] == [STEPS]
