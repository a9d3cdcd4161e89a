# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/caat_sweep.py``: short runs, its tables, its picture, its arguments."""

import json
from dataclasses import replace

import pytest
import torch

from scripts.papers import caat_sweep as script
from scripts.papers.caat_sweep import GROUPS, ORDINARY, Run, runs_of


def options(*argv):
    return script._parse(list(argv))


def finished(runs, loss):
    return {run: {"validation_loss": loss(run)} for run in runs}


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    text = torch.arange(4096, dtype=torch.int64).remainder(251).to(torch.uint8)
    monkeypatch.setattr(script, "read_bytes", lambda split: text)
    monkeypatch.setattr(script, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(script, "BATCH", 2)


@pytest.mark.parametrize(
    "run",
    [
        Run("full", 4, 0.5),
        Run("top-k", 8, 0.5),
        Run("random", 8, 0.5),
        Run("full", 8, 0.5, "bfloat16", "activation"),
        Run("cola", 4, 0.5),
    ],
    ids=lambda run: run.name,
)
def test_a_run_learns_and_is_not_repeated(run, tmp_path, monkeypatch):
    result = script.train(run, 4, str(tmp_path))
    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]
    assert 0 < result["validation_loss"] < 6
    monkeypatch.setattr(script, "build_model", None)
    assert script.train(run, 4, str(tmp_path)) == json.loads(json.dumps(result))


def test_sharing_everything_trains_like_the_ordinary_model(tmp_path):
    shared = script.train(Run("full", 8, 1.0, "float64"), 3, str(tmp_path))
    ordinary = script.train(replace(ORDINARY, dtype="float64"), 3, str(tmp_path))
    # The weights and the loss are fp32, so that a loss may be rounded otherwise: by 2^-23.
    assert shared["losses"] == pytest.approx(ordinary["losses"], rel=1e-6)
    other = script.train(Run("full", 8, 0.5, "float64"), 3, str(tmp_path))
    assert other["losses"] != pytest.approx(shared["losses"], rel=1e-4)


def test_tables_and_picture(tmp_path):
    chosen = options("--fractions=1,0.5,0")
    runs = {run for group in GROUPS for run in runs_of(group, chosen.fractions, chosen.lanes)}
    results = finished(runs, lambda run: 2.0 - run.fraction + 0.01 * run.lanes + 0.1 * run.seed)
    rows = script.tables(results, chosen)
    by = {(row["table"], row["p"]): row for row in rows[:-1]}
    assert by["lanes", 0.5] == {"table": "lanes", "p": 0.5, "4 lanes": 1.54, "8 lanes": 1.58}
    assert by["lanes", 1.0]["4 lanes"] == by["lanes", 1.0]["8 lanes"] == 1.01
    assert set(by["masks", 0.5]) == {"table", "p", "CAAT-Net", "top-k", "random"}
    assert ("masks", 0.0) not in by  # nothing would be sent at all
    assert {"fp32", "bf16"} <= by["sums", 0.5].keys()
    assert {"btp", "btp_caat, 4 lanes"} <= by["hybrid", 0.5].keys()
    assert rows[-1]["another seed"] == pytest.approx(1.11)
    assert len(script.as_text(rows).splitlines()) == len(rows)
    script.draw(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--steps=0", "a positive integer"),
        ("--workers=0", "a positive integer"),
        ("--fractions=1,2", "numbers from 0 to 1"),
        ("--fractions=half", "numbers from 0 to 1"),
        ("--lanes=3", "some of 2, 4 and 8"),
        ("--groups=all", "some of lanes, masks, sums, hybrid"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(argument, told, capsys):
    with pytest.raises(SystemExit) as exit_:
        options(argument)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
