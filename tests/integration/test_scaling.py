# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/scaling.py`` from the plan to the fit, with real runs of two steps."""

import json
import signal
import sys

import pytest

from tests.integration import runs

SCALING = [sys.executable, "scripts/scaling.py"]
LOSS = "validation_metrics/loss"

EXPERIMENT = """
name = "toy"
config = "{config}"
overrides = ["validation.steps=1"]
seeds = [0, 1]
tokens_per_parameter = [0.02]
checkpoints = 0
learning_rate.grid = [3e-3]

[families.full]
[families.cola]

[sizes.a]
dim = 16
ffn_dim = 48
n_heads = 2
n_layers = 2

[sizes.b]
dim = 16
ffn_dim = 48
n_heads = 2
n_layers = 3
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """An experiment that is stopped in its first runs, continued, and fitted."""
    base = tmp_path_factory.mktemp("scaling")
    config = runs.write_config(base / "dump", "llama_full")
    (base / "toy.toml").write_text(EXPERIMENT.format(config=config))
    work = base / "work"
    arguments = [base / "toy.toml", f"--out={work}", "--jobs=2"]
    first = runs.Process([*SCALING, "run", *arguments])
    first.wait_until(lambda: len(list(work.glob("runs/*/run.json"))) == 2)
    first.send(signal.SIGINT)
    stopped = first.finish()
    plan = runs.run([*SCALING, "plan", *arguments, "--json"])
    went_on = runs.run([*SCALING, "run", *arguments])
    fitted = runs.run([*SCALING, "fit", *arguments, "--draws=20"])
    return work, stopped, plan, went_on, fitted


def test_a_stopped_experiment_goes_on(toy):
    _, stopped, plan, went_on, _ = toy
    assert stopped.status == 130, stopped.everything
    assert stopped.err.splitlines()[-1].startswith("stopped by SIGINT")
    rows = json.loads(plan.out)
    assert [row["runs"] for row in rows] == [2] * 4 and sum(row["done"] for row in rows) < 8
    assert all(row["flops"] > 0 and row["expected_seconds"] > 0 for row in rows)
    assert went_on.status == 0, went_on.everything
    assert "8 of 8 runs have a result, 0 failed" in went_on.out


def test_the_points_are_those_of_the_histories(toy):
    work, *_, fitted = toy
    assert fitted.status == 0, fitted.everything
    found = json.loads((work / "scaling.json").read_text())
    assert [(p["family"], p["size"]) for p in found["points"]] == [
        (family, size) for family in ("full", "cola") for size in "ab"
    ]
    for point in found["points"]:
        folders = sorted(work.glob(f"runs/{point['family']}_{point['size']}_*"))
        losses = [[r[LOSS] for r in runs.history(f) if LOSS in r][-1] for f in folders]
        assert point["losses"] == losses and losses[0] != losses[1]
        record = json.loads((folders[0] / "job_config.json").read_text())
        assert record["metrics"]["wandb_group"] == "toy"
        assert record["metrics"]["wandb_tags"][:2] == [point["family"], point["size"]]
    assert len(found["commits"]) == 1 and found["skipped"]
    assert (work / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert fitted.out.strip() == (work / "scaling.md").read_text().strip()


def test_another_commit_is_refused_and_then_named(toy):
    work, *_ = toy
    path = sorted(work.glob("runs/*/run.json"))[0]
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"commits": ["0123456789ab"]}))
    arguments = [work.parent / "toy.toml", f"--out={work}"]
    refused = runs.run([*SCALING, "run", *arguments])
    assert refused.status == 2 and "0123456789ab" in refused.err and "--mix_commits" in refused.err
    mixed = runs.run([*SCALING, "run", *arguments, "--mix_commits"])
    assert mixed.status == 0, mixed.everything
    table = runs.run([*SCALING, "fit", *arguments, "--draws=20"]).out
    assert "**The runs are of different commits**" in table
