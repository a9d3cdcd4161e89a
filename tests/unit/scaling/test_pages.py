# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tables that an experiment writes into a page."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest

from tests.commands import ROOT
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.pages import PARTS, differences, fill_in, gaps, student
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.points import Point
from torchtitan_lr.scaling.report import results
from torchtitan_lr.training.figures import COLORS, color_of
from torchtitan_lr.training.summary import TRAIN_LOSS

PAGES = [
    path for path in (ROOT / "docs/results").glob("*.md") if "<!-- scaling" in path.read_text()
]

TOML = """
name = "levels"
config = "debug_full"
seeds = [0, 1, 2]
tokens_per_parameter = [5.0, 10.0]
equal = "flops"
learning_rate.grid = [1e-3]
levels = "share"

[families.full]

[families.half]
model = "llama_cola"
group = "cola"
level = 0.5

[families.whole]
model = "llama_cola"
group = "cola"
level = 1.0

[sizes.a]
dim = 16
ffn_dim = 48
n_layers = 1
n_heads = 2
"""
PAGE = "".join(
    f"<!-- scaling levels: {part} -->\nold\n<!-- end -->\n"
    for part in ("table", "halves", "searches", "laws", "picture", "source")
)


def point(family, losses):
    return Point(family, "a", 1.0, 1e-3, 1, 1.0, 1.0, 0.0, 0.0, dict(enumerate(losses)), 3)


def test_differences_are_paired_by_seed():
    full = point("full", [4.0, 5.0, 6.0])
    better = point("b", [3.9, 4.9, 5.9])
    worse = point("c", [4.1, 5.1, 6.13])
    found = differences([better, full, worse], "full")
    # By hand: gaps of -0.1 without spread and of 0.1, 0.1, 0.13; four degrees of freedom.
    half = 2.776 * (2 * 0.01**2 + 0.02**2) ** 0.5 / 4**0.5 / 3**0.5
    assert found["b", "a", 1.0] == f"-0.100 [{-0.1 - half:+.3f}, {-0.1 + half:+.3f}]"
    assert found["c", "a", 1.0].startswith("+0.110 [")
    assert ("full", "a", 1.0) not in found
    assert differences([point("b", [3.0]), point("full", [4.0])], "full")["b", "a", 1.0] == "-1.000"


def test_students_quantiles():
    assert student(4) == 2.776 and student(20) == pytest.approx(2.086, rel=2e-3)
    assert student(1000) == pytest.approx(1.962, rel=1e-3)


def test_a_page_is_filled_in(tmp_path):
    (tmp_path / "levels.toml").write_text(TOML)
    plan = Plan(read_experiment(str(tmp_path / "levels.toml")), tmp_path / "work")
    generator = np.random.default_rng(0)
    for run in plan.main_runs():
        record = {"run": asdict(run), "status": "finished", "commits": ["abc"]}
        record["machine"] = {"device": None, "cpu": "X", "cores": 2, "torch": "2", "python": "3"}
        loss = 5 - 0.2 * (run.family == "whole") + 0.01 * generator.standard_normal()
        record["row"] = {"val_loss": loss, "cpu_seconds": 60.0}
        folder = plan.folder(run)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    plan.read()
    page = tmp_path / "docs" / "results" / "levels.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    found = results(plan, 10, 0.01, False)
    fill_in(plan, found, page)
    text = page.read_text()
    flat = " ".join(text.split())
    assert "old" not in text and text.count("<!-- end -->") == 6
    assert "18 of 18 runs" in flat and "seeds 0, 1, 2 at commit abc on X, 2 cores" in flat
    assert "18 minutes of one core" in flat and "not finished" not in flat
    row = next(line for line in text.splitlines() if line.startswith("| whole | a |"))
    assert "3 of 3" in row and "| -0.2" in row
    assert "| whole | a |" in text.partition("minus full at twice the FLOPs")[2]
    assert (page.parent.parent / "images" / "scaling_levels.png").read_bytes()[:4] == b"\x89PNG"
    fill_in(plan, found, page)
    assert page.read_text() == text
    assert "different commits" not in text
    next(iter(plan.records.values()))["commits"] = ["abc", "def"]
    fill_in(plan, found, page)
    flat = " ".join(page.read_text().split())
    assert "at **different commits**, abc (18 runs), def (1 runs), on X" in flat
    page.write_text("no part")
    with pytest.raises(ConfigError, match="a page with <!-- scaling levels: table -->"):
        fill_in(plan, found, page)


def test_gaps_are_those_of_the_histories(tmp_path):
    (tmp_path / "levels.toml").write_text(TOML.replace("5.0, 10.0", "5.0"))
    plan = Plan(read_experiment(str(tmp_path / "levels.toml")), tmp_path / "work")
    for run in plan.main_runs():
        folder = plan.folder(run)
        folder.mkdir(parents=True)
        offset = run.seed + {"full": 0.0, "half": 0.25, "whole": -0.5}[run.family]
        losses = [5 + offset, 4 + offset, 3 + offset, 2 + 2 * offset]
        rows = [{"step": i, TRAIN_LOSS: loss} for i, loss in enumerate(losses)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        plan.records[run.name] = {"status": "finished", "run": asdict(run), "row": {}}
    text = gaps(plan, {})
    assert "| full, seed 0 | full, seed 1 | 1.2500 | -1.2500 | -1.5000 |" in text
    assert "| full, seed 0 | half, seed 0 | 0.3125 | -0.3125 | -0.3750 |" in text
    assert "half, seed 1 | half" not in text and "full, seed 0 | whole, seed 1" not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_shipped_page_can_be_made_again(page):
    text = page.read_text()
    blocks = re.findall(r"<!-- scaling ([\w.+-]+): (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert len(blocks) == text.count("<!-- scaling") == text.count("<!-- end -->") > 0
    for name, part, inside in blocks:
        assert read_experiment(name).name == name and part in (*PARTS, "picture")
        for command in ("run", "page"):
            assert f"scripts/scaling.py {command} {name} --out outputs/{name}" in text
        for image in re.findall(r"\]\((.*?)\)", inside):
            assert (page.parent / image).is_file()
    assert "**Follows.**" in text and "## Left out" in text and "@@" not in text


def test_every_experiment_of_a_question_has_a_page():
    shipped = {path.stem for path in (ROOT / "train_configs/experiments").glob("*.toml")}
    shown = {name for page in PAGES for name in re.findall("<!-- scaling (.*?):", page.read_text())}
    assert shipped - shown == {"scaling_cpu", "scaling_papers"} and len(PAGES) == 6


def test_a_method_has_one_colour():
    assert color_of("cola") == COLORS["cola"] != color_of("lax")
    assert color_of("sketch-10x") == COLORS["sketch"] and color_of("TSR-keep") == COLORS["TSR keep"]
    assert color_of("8 lanes") == COLORS["8 lanes"] and color_of("new", 3) == "C3"
