# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/scaling.py`` from the plan to the page, with real runs of a few steps."""

import json
import re
import sys

import pytest

from tests.integration import runs

LOSS = "validation_metrics/loss"

EXPERIMENT = """
name = "toy"
config = "{config}"
overrides = ["validation.steps=1"]
seeds = [0, 1]
tokens_per_parameter = [0.04]
checkpoints = 1
learning_rate.grid = [3e-3]

[families.full]
[families.cola]
rate_of = "full"

[sizes.a]
dim = 16
ffn_dim = 48
n_heads = 2
n_layers = 2
"""

PAGE = """# Toy

<!-- scaling toy: table -->
<!-- end -->

<!-- scaling toy: ranks -->
<!-- end -->

Below.
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """An experiment that is stopped in its first runs, continued, and fitted."""
    base = tmp_path_factory.mktemp("scaling")
    config = runs.write_config(base / "dump", "llama_full")
    (base / "toy.toml").write_text(EXPERIMENT.format(config=config))
    (base / "page.md").write_text(PAGE)
    work = base / "work"
    arguments = [str(base / "toy.toml"), f"--out={work}", "--jobs=2"]
    commands = [["run", *arguments], ["plan", *arguments, "--json"], ["run", *arguments]]
    commands.append(["fit", *arguments, "--draws=20"])
    commands.append(["page", *arguments, f"--page={base / 'page.md'}"])
    # The file is written just before the first run starts.
    stop_at = work / "runs" / "cola_a_0.04_seed0_lr0.003" / "run.json"
    driver = [sys.executable, "-m", "tests.integration.scaling_commands", stop_at]
    done = runs.run([*driver, json.dumps(commands)])
    texts = done.out.split("-" * 9 + "\n")
    assert len(texts) == 6, done.everything
    return work, texts, done


def test_a_stopped_experiment_goes_on(toy):
    _, (stopped, plan, went_on, *_), done = toy
    assert stopped == "status 130\n", done.everything
    assert "stopped by SIGINT: run the same command to continue" in done.err
    rows = json.loads(plan.rpartition("status")[0])
    assert [row["runs"] for row in rows] == [2] * 2 and sum(row["done"] for row in rows) < 4
    assert all(row["flops"] > 0 and row["expected_seconds"] > 0 for row in rows)
    assert "4 of 4 runs have a result, 0 failed\nstatus 0" in went_on


def test_the_points_are_those_of_the_histories(toy):
    work, (*_, fitted, _, _), done = toy
    assert fitted.endswith("status 0\n"), done.everything
    found = json.loads((work / "scaling.json").read_text())
    assert [(p["family"], p["size"]) for p in found["points"]] == [("full", "a"), ("cola", "a")]
    for point in found["points"]:
        folders = sorted(work.glob(f"runs/{point['family']}_{point['size']}_*"))
        losses = [[r[LOSS] for r in runs.history(f) if LOSS in r][-1] for f in folders]
        assert point["losses"] == losses and losses[0] != losses[1]
        record = json.loads((folders[0] / "job_config.json").read_text())
        assert record["metrics"]["wandb_group"] == "toy"
        assert record["metrics"]["wandb_tags"][:2] == [point["family"], point["size"]]
    assert len(found["commits"]) == 1 and found["skipped"]
    assert (work / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert fitted.rpartition("status")[0].strip() == (work / "scaling.md").read_text().strip()


def test_a_page_has_the_table_of_its_runs(toy):
    work, (*_, paged, _), done = toy
    assert paged.endswith("status 0\n"), done.everything
    page = (work.parent / "page.md").read_text()
    assert page.startswith("# Toy\n") and page.endswith("<!-- end -->\n\nBelow.\n")
    points = json.loads((work / "scaling.json").read_text())["points"]
    for point in points:
        mean = sum(point["losses"]) / 2
        assert f"| {point['family']} |" in page and f"{mean:.4f} ±" in page
    # Effective ranks over the widths; only a low-rank family has latents.
    outputs, nothing = re.search(r"\| full \| \d+ \| ([\d.]+) \|(.*)\|", page).groups()
    assert 0 < float(outputs) <= 1 and not nothing.strip()
    latents = re.search(r"\| cola \| \d+ \| [\d.]+ \| ([\d.]+) \|", page)[1]
    assert 0 < float(latents) <= 1


def test_a_forked_run_equals_one_of_the_launcher(toy, tmp_path):
    """To the last digit; another seed is the control."""
    work, *_ = toy
    path = work / "runs" / "cola_a_0.04_seed1_lr0.003"
    record = json.loads((path / "run.json").read_text())
    config = work.parent / "dump.toml"
    launched = runs.launch(config, *record["arguments"], f"--job.dump_folder={tmp_path}", ranks=1)
    done = launched.finish()
    assert done.status == 0, done.everything
    same = runs.exact(runs.history(tmp_path))
    assert same == runs.exact(runs.history(path)) and len(same) > 2
    assert same != runs.exact(runs.history(path.with_name(path.name.replace("seed1", "seed0"))))


def test_another_commit_is_refused_and_then_named(toy, tmp_path):
    work, *_ = toy
    path = sorted(work.glob("runs/*/run.json"))[0]
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"commits": ["0123456789ab"]}))
    arguments = [str(work.parent / "toy.toml"), f"--out={work}"]
    commands = [["run", *arguments], ["run", *arguments, "--mix_commits"]]
    commands.append(["fit", *arguments, "--draws=20"])
    driver = [sys.executable, "-m", "tests.integration.scaling_commands", tmp_path / "never"]
    done = runs.run([*driver, json.dumps(commands)])
    refused, mixed, fitted, _ = done.out.split("-" * 9 + "\n")
    assert refused == "status 2\n" and mixed.endswith("status 0\n"), done.everything
    assert "0123456789ab" in done.err and "--mix_commits" in done.err
    assert "**The runs are of different commits**" in fitted
