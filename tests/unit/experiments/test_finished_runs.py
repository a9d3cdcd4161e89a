# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that finished on one machine do not run again on another."""

import json
from pathlib import Path

import pytest

from scripts.research import finished_runs, result_tables
from tests.unit.experiments.test_experiment import TOML
from torchtitan_lr.experiments.experiment import read_experiment
from torchtitan_lr.experiments.plan import Plan
from torchtitan_lr.experiments.sweep import POINT_FILE, Point, read_results, settings_of

COMMIT = "c0ffee12"


def record(work: Path, point: Point, status: str, config: str) -> None:
    """Write what a sweep on another machine leaves of a run."""
    row = {"status": status, "val_loss": 4.5, "steps": 7}
    (work / point.name).mkdir(parents=True)
    record = {"settings": settings_of(point), "arguments": [config, *point.arguments], "row": row}
    text = json.dumps(record)
    (work / point.name / POINT_FILE).write_text(text)


def test_stored_runs_are_done_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_runs, "FOLDER", tmp_path)
    (tmp_path / "x.toml").write_text(TOML)
    experiment = read_experiment(str(tmp_path / "x.toml"))
    there, here = tmp_path / "there", tmp_path / "here"
    full = Plan(experiment, there).searched({}).points[:3]
    for point, status in zip(full, ("finished", "diverged", "cut off"), strict=True):
        record(there, point, status, "/elsewhere/train_configs/debug_full.toml")
    assert finished_runs.main(["store", "x", str(there)]) == 0
    stored = finished_runs.stored_runs("x")
    assert [*stored] == sorted(point.name for point in full[:2])
    assert all(len(run["commit"]) >= 8 and run["torch"][0] == "2" for run in stored.values())
    assert finished_runs.main(["begin", "x", str(here)]) == 0
    points = Plan(experiment, here).searched({}).points[:3]
    read_results(here, points)  # it refuses runs of other settings
    assert [point.is_done for point in points] == [True, True, False]
    assert points[0].row["val_loss"] == 4.5
    assert finished_runs.restore("x", finished_runs.plan_of("x", here)) == 0
    # A folder's new runs get the versions of its last start; those that were stored keep their own.
    (here / finished_runs.VERSIONS_FILE).write_text(f'{{"commit": "{COMMIT}", "torch": "2.99"}}')
    record(here, full[2], "finished", "/elsewhere/train_configs/debug_full.toml")
    assert finished_runs.main(["begin", "x", str(here)]) == 0
    again = finished_runs.stored_runs("x")
    assert again.pop(full[2].name)["commit"] == COMMIT
    assert again == stored
    # The control: an experiment of other settings refuses the stored runs.
    other = Plan(read_experiment(str(tmp_path / "x.toml"), ["--optimizer.beta1=0.8"]), here)
    with pytest.raises(ValueError, match="of other settings"):
        read_results(here, other.searched({}).points)


PAGE = result_tables.PAGE.read_text()


@pytest.mark.parametrize("name", result_tables.placed(PAGE))
def test_the_page_has_the_tables_of_the_stored_runs(name: str) -> None:
    assert result_tables.with_tables(PAGE, name) == PAGE, (
        "run python -m scripts.research.result_tables"
    )
