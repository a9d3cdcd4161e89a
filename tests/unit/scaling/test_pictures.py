# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the pictures of experiments show: points, bands, ticks and colours."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba

from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.pictures import draw
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.points import points_of
from torchtitan_lr.scaling.report import results
from torchtitan_lr.training.figures import COLORS
from torchtitan_lr.training.summary import TRAIN_LOSS

TOML = """
name = "sizes"
description = "two families"
config = "debug_full"
seeds = [0, 1, 2]
tokens_per_parameter = [5.0, 10.0]
equal = "flops"
learning_rate.grid = [1e-3]

[families.full]
[families.cola]
"""
SIZE = "[sizes.s{0}]\ndim = {0}\nffn_dim = 48\nn_layers = 1\nn_heads = 2\n"


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return made(tmp_path_factory.mktemp("laws"), TOML, (8, 16, 32, 64))


def made(folder, text, sizes):
    """A plan with records of all runs, whose losses follow a law."""
    (folder / "x.toml").write_text(text + "".join(SIZE.format(size) for size in sizes))
    plan = Plan(read_experiment(str(folder / "x.toml")), folder / "work")
    for run in plan.main_runs():
        flops = plan.flops(run) / 1e8
        loss = 3 + flops**-0.2 + 0.05 * run.seed + 0.3 * (run.family == "full")
        row = {"val_loss": loss, "cpu_seconds": 1.0}
        plan.records[run.name] = {"run": asdict(run), "status": "finished", "row": row}
        plan.records[run.name]["commits"] = ["c"]
        plan.folder(run).mkdir(parents=True)
        history = [{"step": step, TRAIN_LOSS: 5 + run.seed - 0.1 * step} for step in range(1, 9)]
        lines = "".join(json.dumps(record) + "\n" for record in history)
        (plan.folder(run) / "metrics.jsonl").write_text(lines)
    return plan


def bands(axes):
    return [c for c in axes.collections if isinstance(c, PolyCollection) and len(c.get_paths())]


def test_laws_have_points_of_seeds_and_bands(plan, tmp_path):
    found = results(plan, 10, 0.01, False)
    figure = draw(plan, found, tmp_path / "laws.png")
    assert (tmp_path / "laws.png").read_bytes()[:4] == b"\x89PNG"
    title = figure.get_suptitle()
    assert title.startswith("two families") and "seeds" in title
    flops, parameters, sent, _ = figure.axes
    points = np.concatenate(
        [line.get_xydata() for line in flops.lines if line.get_marker() in "os"]
    )
    assert len(points) == 16
    ranges = [path.get_extents().height for c in flops.collections for path in c.get_paths()]
    assert sum(abs(height - 0.1) < 1e-9 for height in ranges) == 16
    fitted = {fit.family for fit in found["fits"] if fit.axes == ("flops",)}
    assert len(bands(flops)) == 2 and fitted == {"full", "cola"}
    losses = [loss for point in found["points"] for loss in point.losses]
    low, high = flops.get_ylim()
    assert low < min(losses) and high > max(losses) and high - low < 1.3 * np.ptp(losses)
    for axes in (flops, parameters):
        assert axes.get_xlabel() and 2 <= len(axes.get_xticks()) <= 5
    assert sent.texts[0].get_text() == "none on one rank"
    colors = {to_rgba(line.get_color()) for line in flops.lines}
    assert colors == {to_rgba(COLORS[name]) for name in ("full", "cola")}
    (legend,) = figure.legends  # beside the data: no panel has one
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[:2] == ["full", "cola"] and shown[-1] == "10 tokens per parameter"
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_curves_have_bands_of_seeds(tmp_path):
    text = TOML.replace("5.0, 10.0", "5.0").replace("[families.cola]", "[families.base]")
    text = text.replace("[families.full]", "[families.AdamW]").replace('equal = "flops"', "")
    for name in ("AdamW", "base"):
        text = text.replace(f"[families.{name}]", f'[families.{name}]\nmodel = "llama_full"')
    plan = made(tmp_path, text, (8,))
    figure = draw(plan, {"points": results(plan, 2, 0.01, False)["points"]}, tmp_path / "c.png")
    left, right = figure.axes
    assert len(bands(left)) == 2 == len(left.lines) and not right.lines
    means = left.lines[0].get_ydata()
    assert means[3] == pytest.approx(5 + 1 - 0.1 * 4)  # the middle seed's, smoothed
    assert bands(left)[0].get_paths()[0].get_extents().height > 2
    assert left.lines[0].get_linewidth() > left.lines[1].get_linewidth()
    assert left.lines[0].get_color() == COLORS["AdamW"]


def test_budgets_of_equal_parameters_are_lines_over_flops(tmp_path):
    text = TOML.replace('equal = "flops"', 'equal = "flops"\nmatch = "parameters"')
    plan = made(tmp_path, text, (16, 32))
    figure = draw(plan, {"points": results(plan, 2, 0.01, False)["points"]}, tmp_path / "b.png")
    (axes,) = figure.axes
    assert len(axes.lines) == 4 and len(bands(axes)) == 4
    lines = {(line.get_color(), line.get_linestyle()): line for line in axes.lines}
    assert len(lines) == 4 and {color for color, _ in lines} == {COLORS["full"], COLORS["cola"]}
    point = min(points_of(plan), key=lambda p: (p.family != "full", p.size != "s16", p.flops))
    first = lines[COLORS["full"], "-"]
    assert first.get_xdata()[0] == point.flops and first.get_ydata()[0] == point.loss
    assert bands(axes)[0].get_paths()[0].get_extents().height > 0.1  # the range of seeds
    # The axis is that of equal FLOPs: both families have them at a budget.
    assert lines[COLORS["cola"], "-"].get_xdata() == pytest.approx(first.get_xdata(), rel=0.1)


def test_lines_of_levels_that_coincide_are_both_seen(tmp_path):
    text = TOML.replace("5.0, 10.0", "5.0")
    for group in ("sketch", "sparse"):
        for level in (2, 4):
            text += f'[families.{group}-{level}x]\nmodel = "llama_cola"\n'
            text += f'group = "{group}"\nlevel = {level}.0\n'
    plan = made(tmp_path, text, (8,))
    figure = draw(plan, {"points": results(plan, 2, 0.01, False)["points"]}, tmp_path / "l.png")
    (axes,) = figure.axes
    base, sketch, sparse = axes.lines
    assert sketch.get_ydata().tolist() == sparse.get_ydata().tolist()
    assert sketch.get_linewidth() > sparse.get_linewidth()
    assert sketch.get_linestyle() != sparse.get_linestyle()
    assert [sketch.get_color(), sparse.get_color()] == [COLORS["sketch"], COLORS["sparse"]]
    assert axes.get_xticks().tolist() == [2, 4] and base.get_color() == COLORS["full"]
