# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One job that is stopped four times, against the same job left alone.

SIGTERM, SIGINT, two signals, a kill in mid-save: each stage starts the same command again, and at
the end there must be no trace of them in the numbers.
"""

import os
import re
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from tests.integration import runs

STEPS = 30
INTERVAL = 5

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches ranks by /proc")


class Life:
    """The stages of one job; each runs once, after those before it."""

    def __init__(self, folder):
        self.folder = folder
        self.config = runs.write_config(folder, steps=STEPS, interval=INTERVAL)
        self._stages = {}
        self.broken = ""

    def stage(self, name):
        """What happened in a stage."""
        for stage in ("sigterm", "sigint", "twice", "killed", "rest"):
            if stage not in self._stages:
                assert not self.broken, f"stage {self.broken} went wrong"
                self.broken = stage
                self._stages[stage] = self._live(stage)
                self.broken = ""
            if stage == name:
                return self._stages[stage]
        raise KeyError(name)

    def _live(self, name):
        before = max(runs.complete_steps(self.folder), default=0)
        stale = runs.history_file(self.folder)
        process = runs.launch(self.config)
        try:
            if name != "rest":
                process.wait_until(lambda: runs.history_file(self.folder) not in (None, stale))
                process.wait_until(lambda: runs.last_step(self.folder) >= before + 2)
            extra = getattr(self, f"_{name}")(process)
            done = process.finish()
        except BaseException:
            process.send(signal.SIGKILL)
            raise
        folders = runs.step_folders(self.folder)
        last = runs.last_step(self.folder)
        if "torn" in extra:
            extra["copy"] = self._copy(extra["torn"])
        return SimpleNamespace(before=before, done=done, folders=folders, last=last, **extra)

    def _sigterm(self, process):
        process.send(signal.SIGTERM)
        return {}

    def _sigint(self, process):
        process.send(signal.SIGINT)
        return {}

    def _twice(self, process):
        pids = process.rank_pids()
        process.send(signal.SIGTERM)
        # Well before rank 0, which waits 2 s for the others, can have ended by itself.
        time.sleep(0.2)
        process.send(signal.SIGTERM)
        return {"pids": pids}

    def _killed(self, process):
        """SIGKILL for all ranks while a save is under way: a folder is there, its end is not."""
        pids = process.rank_pids()
        known = set(runs.step_folders(self.folder))

        def new_folders():
            return runs.step_folders(self.folder).keys() - known

        while True:
            new = process.wait_until(new_folders, pause=0.001)
            step = max(new)
            runs.freeze(pids)  # the kill must not come later than the look
            if not runs.step_folders(self.folder)[step]:
                break
            known |= new  # complete already: wait for the next one
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return {"torn": step, "pids": pids}

    def _rest(self, process):
        return {}

    def _copy(self, step):
        """Keeps a checkpoint folder as it is now, with what a reader needs beside it."""
        folder = self.folder / "checkpoint" / f"step-{step}"
        copy = self.folder.parent / "torn" / "checkpoint" / folder.name
        shutil.copytree(folder, copy)
        shutil.copy(self.folder / "job_config.json", self.folder.parent / "torn")
        return copy


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    return Life(tmp_path_factory.mktemp("life") / "dump")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", ["sigterm", "sigint"])
def test_a_signal_saves_that_very_step(life, name):
    stage = life.stage(name)
    assert stage.done.status == 0, stage.done.everything
    assert stage.before + 2 <= stage.last < STEPS
    assert stage.folders[stage.last]  # complete
    checkpoint = life.folder / "checkpoint" / f"step-{stage.last}"
    stops = [
        line
        for line in stage.done.out.splitlines() + stage.done.err.splitlines()
        if "resume" in line
    ]
    assert len(stops) == 1, stops
    assert re.search(
        rf"Stopped by SIG(TERM|INT) after step {stage.last} of {STEPS}, checkpoint "
        rf"{re.escape(str(checkpoint))}: run the same command again to resume",
        stops[0],
    )
    assert "Traceback" not in stage.done.out + stage.done.err
    assert stage.done.own_lines() == []
    # An unfinished run has no summary to be taken for a finished one's.
    assert not (life.folder / "summary.json").exists()


def test_the_next_start_goes_on_from_there(life):
    first, second = life.stage("sigterm"), life.stage("sigint")
    assert first.before == 0 and "Training starts at step 1\n" in first.done.out
    assert second.before == first.last
    assert f"Training starts at step {first.last + 1}\n" in second.done.out


def test_a_second_signal_kills(life):
    stage = life.stage("twice")
    assert stage.done.status == 128 + signal.SIGTERM, stage.done.everything
    (line,) = stage.done.own_lines()
    assert line.startswith("error: killed by SIGTERM; logs: ")
    assert "Traceback" not in stage.done.out + stage.done.err
    assert len(stage.pids) == 2
    assert not any(map(alive, stage.pids))


def test_a_kill_in_mid_save_leaves_nothing_to_trust(life):
    stage = life.stage("killed")
    assert stage.done.status not in (0, 2), stage.done.everything
    (line,) = stage.done.own_lines()
    assert line.startswith("error: ") and "logs" in line
    assert len(stage.pids) == 2
    assert not any(map(alive, stage.pids))
    # The folder is there and newer than every checkpoint, but no script takes it for one.
    assert not stage.folders[stage.torn]
    assert stage.torn > max(step for step, complete in stage.folders.items() if complete)
    done = runs.run([sys.executable, "scripts/export.py", stage.copy, stage.copy / "out"])
    assert done.status == 2, done.everything
    (line,) = done.err.splitlines()
    assert "no .metadata" in line


def test_the_start_after_it_takes_the_last_complete_checkpoint(life):
    killed, rest = life.stage("killed"), life.stage("rest")
    assert rest.done.status == 0, rest.done.everything
    complete = max(step for step, complete in killed.folders.items() if complete)
    assert complete < killed.torn
    assert f"checkpoint/step-{complete}." in rest.done.out
    assert f"Training starts at step {complete + 1}\n" in rest.done.out
    assert rest.last == STEPS
    # That step is saved again over what was torn.
    assert rest.folders[killed.torn]


def test_no_digit_differs_from_the_undisturbed_run(life, undisturbed):
    life.stage("rest")
    disturbed, expected = (runs.exact(runs.history(f)) for f in (life.folder, undisturbed.folder))
    assert disturbed == expected
    # The comparison sees every step and its losses, and no two steps are alike.
    losses = [r["loss_metrics/global_avg_loss"] for r in expected if "grad_norm" in r]
    assert len(set(losses)) == len(losses) == STEPS
    assert [r["step"] for r in expected if "validation_metrics/loss" in r] == [1, STEPS]


def test_times_do_differ(life, undisturbed):
    """The control: these are two runs, whose other records are not alike."""
    life.stage("rest")
    disturbed, expected = (runs.history(f) for f in (life.folder, undisturbed.folder))
    assert len(disturbed) == len(expected)
    assert disturbed != expected
