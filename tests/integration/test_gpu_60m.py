# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rehearsal of the table at 60M, on a CPU with the debug model."""

import json
import sys

import pytest

from scripts.research.gpu_60m import REHEARSAL, Race, main
from tests.integration import runs

FAMILIES = 7


@pytest.mark.nightly
def test_a_rehearsal_ends_with_all_curves_and_names_what_is_cut_off(tmp_path):
    command = [sys.executable, "-m", "scripts.research.gpu_60m"]
    common = [f"--work={tmp_path}", "--small", "--device=cpu", "--seconds=3000"]
    for part in ("corpus", "tokens", "run"):
        done = runs.run([*command, part, *common])
        assert done.status == 0, done.everything
    out = tmp_path / "gpu_60m.json"
    found = json.loads(out.read_text())
    listed = json.loads((tmp_path / "corpus.json").read_text())
    assert found["corpus"] == listed and listed["files"] == REHEARSAL.files
    assert len(found["runs"]) == FAMILIES
    for run in found["runs"].values():
        assert run["status"] == "finished" and 5 < run["val_loss"] < 7  # ln 512 is 6.2
        assert [step for step, _ in run["curve"]] == [1, 2, 3, 4]

    race = Race(tmp_path, out, REHEARSAL)
    race.plan.experiment = race.with_steps(found["steps"])
    race.points = race.plan.points(race.plan.searched({}))
    assert len(race.points) == FAMILIES
    point = tmp_path / "runs" / race.points[-1].name / "point.json"
    point.write_text(point.read_text().replace('"status": "finished"', '"status": "stopped"'))
    race.write()
    states = [run["status"] for run in json.loads(out.read_text())["runs"].values()]
    assert states == ["finished"] * (FAMILIES - 1) + ["cut off"]


def test_a_machine_without_a_gpu_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run", f"--work={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        "error: --device: got 'cuda', expected cpu with --small: this machine shows no GPU\n"
    )
