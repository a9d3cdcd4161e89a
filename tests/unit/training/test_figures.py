# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What is drawn: the lines of the figures, not their pixels."""

import math

import pytest

from torchtitan_lr.training.figures import (
    COLORS,
    color_of,
    draw_curve,
    draw_runs,
    smoothed,
)

LOSSES = [8.0, 6.5, 7.0, 5.0, 5.5, 4.0]


def history(batch=512, scale=1.0):
    """A logged step in ten, and a validation in twenty."""
    records = []
    for index, loss in enumerate(LOSSES, 1):
        step = 10 * index
        record = {"loss_metrics/global_avg_loss": loss * scale, "lr": 1e-3 / index}
        records.append({"step": step, "n_tokens_seen": batch * step, **record})
        if index % 2 == 0:
            entropy = {"validation_metrics/unigram_entropy": 6.0}
            records.append({"step": step, "validation_metrics/loss": loss + 0.1, **entropy})
    return records


def lines_of(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_a_curve_has_all_that_a_run_logged(tmp_path):
    figure = draw_curve(history(), tmp_path / "curve.png", "cola debug, 4 ranks")
    figure.canvas.draw()
    axes, right = figure.axes
    (above,) = axes.child_axes
    assert axes.get_title() == "cola debug, 4 ranks"
    lines = lines_of(axes)
    steps = [10, 20, 30, 40, 50, 60]
    assert lines["training loss"] == [[x, y] for x, y in zip(steps, LOSSES, strict=True)]
    by_hand = [8.0, (8 + 6.5 + 7) / 3, (6.5 + 7 + 5) / 3, (7 + 5 + 5.5) / 3, (5 + 5.5 + 4) / 3, 4.0]
    smooth = [y for _, y in lines["training loss, smoothed"]]
    assert smooth == pytest.approx(by_hand) and smooth != LOSSES
    assert lines["validation loss"] == [[20, 6.6], [40, 5.1], [60, 4.1]]
    (rate,) = right.get_lines()
    assert rate.get_ydata().tolist() == [1e-3 / k for k in range(1, 7)]
    assert right.get_ylabel() == "learning rate" and above.get_xlabel() == "tokens"
    assert above.get_xlim() == pytest.approx([512 * x for x in axes.get_xlim()])
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown[-1] == "learning rate" and len(shown) == 5
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_centred():
    # A straight line stays one: a trailing mean would be late, a shrinking one-sided end bent.
    line = [float(k) for k in range(100)]
    assert smoothed(line) == pytest.approx(line)
    zigzag = [(-1.0) ** k for k in range(100)]
    inner = smoothed(zigzag)[5:-5]
    assert max(map(abs, inner)) <= 0.2 + 1e-12 and not math.isclose(zigzag[50], inner[45])
    assert smoothed([]) == [] and smoothed([3.0]) == [3.0]


def test_runs_in_one_picture(tmp_path):
    runs = {"a": history(), "b": history(scale=2.0), "none": []}
    figure = draw_runs(runs, tmp_path / "runs.png")
    (axes,) = figure.axes
    lines = lines_of(axes)
    assert [y for _, y in lines["b"]] == pytest.approx([2 * y for _, y in lines["a"]])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "none"]
    # No run without steps, and no other batch: then no axis of tokens is true for all.
    assert axes.child_axes == []
    (axes,) = draw_runs({"a": history(), "b": history()}, tmp_path / "runs.png").axes
    assert len(axes.child_axes) == 1
    (axes,) = draw_runs({"a": history(), "b": history(batch=64)}, tmp_path / "runs.png").axes
    assert axes.child_axes == []


def test_runs_of_methods_have_their_colours(tmp_path):
    (axes,) = draw_runs({"full": history(), "cola": history()}, tmp_path / "runs.png").axes
    found = {line.get_label(): line.get_color() for line in axes.get_lines()}
    assert (found["full"], found["cola"]) == (COLORS["full"], COLORS["cola"])
    assert color_of("Vanilla") == COLORS["vanilla"] and color_of("svdx", 2) == "C2"
