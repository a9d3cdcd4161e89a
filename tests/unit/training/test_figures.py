# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A legend covers no line of any picture."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan_lr.scaling import results
from torchtitan_lr.scaling.fit import fit_points
from torchtitan_lr.training.figures import colors_of, draw_curve, draw_runs, finish, new_figure

BETWEEN = 50  # places of each segment


def drawn(figure: Any) -> Iterator[np.ndarray]:
    """Return the places (n, 2) of every line, between its points too, in pixels."""
    figure.canvas.draw()
    for axes in figure.axes:
        for line in axes.lines:
            places = line.get_transform().transform(line.get_xydata().astype(float))
            steps = np.linspace(0, 1, BETWEEN)[:, None, None]
            yield ((1 - steps) * places[:-1] + steps * places[1:]).reshape(-1, 2)
            yield places


def covered(figure: Any) -> bool:
    """Whether a legend lies over a line or leaves the picture."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    boxes = [legend.get_window_extent() for legend in legends if legend is not None]
    assert boxes
    width, height = figure.bbox.size
    leaves = any(min(b.x0, b.y0) < -1 or b.x1 > width + 1 or b.y1 > height + 1 for b in boxes)
    return leaves or any(
        bool(((at > (b.x0, b.y0)) & (at < (b.x1, b.y1))).all(1).any())
        for at in drawn(figure)
        for b in boxes
    )


def history(rate: Callable[[int], float], loss: float = 4.0) -> list[dict[str, Any]]:
    """Losses that fill the picture from corner to corner, with another course of the rate."""
    records: list[dict[str, Any]] = []
    for step in range(1, 101):
        record = {
            "step": step,
            "loss_metrics/global_avg_loss": loss + math.sin(step),
            "lr": rate(step),
        }
        record |= {"n_tokens_seen": 512 * step}
        if step % 20 == 0:
            record |= {"validation_metrics/loss": loss + math.cos(step)}
            record |= {"validation_metrics/unigram_entropy": loss + 1}
        records.append(record)
    return records


def law_rows(families: int) -> list[dict[str, Any]]:
    rows = []
    for family in range(families):
        for size in range(6):
            losses = {0: 5.0 - size / 3 + family / 5, 1: 4.9 - size / 3 + family / 5}
            row = {"family": f"family-{family} of a long name", "losses": losses, "size": size}
            row |= {"FLOPs": 10.0 ** (12 + size), "tokens_per_parameter": 5, "equal": "flops"}
            rows.append(row | {"loss": (float(np.mean([*losses.values()])), None, None)})
    return rows


def scaling(path: Path, families: int) -> Any:
    rows = law_rows(families)
    points = [(row["FLOPs"], row["loss"][0]) for row in law_rows(1)]
    # One fit stands for all: it is drawn as often, and found once.
    fits = dict.fromkeys((row["family"] for row in rows), fit_points(np.asarray(points), draws=4))
    return results.draw("a title", results.judged(rows, fits), fits, path)


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: draw_curve(history(lambda step: 1e-3 * step), path, "a title"),
        lambda path: draw_curve(history(lambda step: 1e-3 / step), path),
        lambda path: draw_runs(
            {"outputs/" + "x" * 150: history(math.sin), "b": history(math.cos)}, path
        ),
        lambda path: draw_runs({f"run {n}": history(math.sin, n) for n in range(12)}, path),
        lambda path: scaling(path, 1),
        lambda path: scaling(path, 14),
    ],
    ids=["curve", "falling rate", "long name", "many runs", "one family", "many families"],
)
def test_no_legend_covers_a_line(draw: Callable[[Path], Any], tmp_path: Path) -> None:
    figure = draw(tmp_path / "new" / "a.png")
    assert not covered(figure)
    assert (tmp_path / "new" / "a.png").read_bytes()[:4] == b"\x89PNG"
    # The control: a legend inside the axes covers them.
    figure.legends.clear()
    figure.axes[0].legend(loc="center")
    assert covered(figure)


def test_titles_and_labels_are_no_formulas(tmp_path: Path) -> None:
    text = r"$\nothing$"
    figure = new_figure()
    figure.add_subplot().plot([0, 1], label=text)
    finish(figure, tmp_path / "a.png", text)
    assert figure.get_suptitle() == figure.legends[0].get_texts()[0].get_text() == text


def test_a_run_whose_name_begins_with_an_underscore_has_a_legend_entry(tmp_path: Path) -> None:
    names = ["_", "_a", "__init", "_child", "b"]
    figure = draw_runs({name: history(math.sin) for name in names}, tmp_path / "a.png")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names


def test_a_label_of_two_panels_occurs_once(tmp_path: Path) -> None:
    figure = new_figure()
    for axes in figure.subplots(1, 2):
        axes.plot([0, 1], [0, 1], label="both")
    finish(figure, tmp_path / "a.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["both"]


def test_methods_of_one_picture_have_different_colours() -> None:
    names = [f"{f}-{o}" for f in ("full", "svd", "cola", "lax") for o in ("AdamW", "Muon", "new")]
    found = colors_of([*names, "C0", "unknown"])
    assert len({*found.values()}) == len(found) == 14
    assert len(colors_of([str(n) for n in range(40)])) == 40
