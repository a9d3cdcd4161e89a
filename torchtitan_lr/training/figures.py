# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pictures: their common parts, a run's curve, and the losses of several runs."""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import escaped
from torchtitan_lr.training import history as logged
from torchtitan_lr.training.history import TRAIN_LOSS, set_losses, train_loss

History = list[dict[str, Any]]

DPI = 160  # with widths of about 7 inches, text of 8 points and more is legible at half width

WIDTH, HEIGHT = 6.6, 4.0
"""Inches of a picture with one panel; its legend is added below."""

TITLE, TEXT = 10, 8  # sizes of the letters, in points
THICK: dict[str, Any] = {"linewidth": 1.6}  # a smoothed or fitted line
THIN: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.4}  # the values as they were logged
DOTS: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": "none"}  # single measurements

_LINE_LETTERS = 90  # of a legend; a longer label is broken into lines

SMOOTHED_POINTS = 20  # a smoothed curve averages over 1/20 of its points, at least over three

_COLORS = (
    *("black", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown"),
    *("tab:pink", "tab:olive", "tab:cyan", "tab:gray", "navy", "gold", "lime", "darkred"),
    *("plum", "teal"),
)


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return the colours of the methods of one picture, in their order; after 17 they repeat."""
    return dict(zip(dict.fromkeys(names), itertools.cycle(_COLORS), strict=False))


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Any:
    """Return an empty figure, of inches, without a display or ``pyplot``'s global state."""
    # Imported late: matplotlib takes a second to import, and most commands draw nothing.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI)


def finish(figure: Any, path: Path, title: str = "") -> None:
    """Add the title above and the legend below all panels, where they cover no line; write the PNG.

    Their text is drawn as it is: a formula between two ``$`` that is none would be an error.
    """
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for artist, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(textwrap.fill(label, _LINE_LETTERS), artist)
    figure.set_layout_engine("constrained")
    if title:
        figure.suptitle(title, fontsize=TITLE, parse_math=False)
    columns = _LINE_LETTERS // (max(map(len, handles), default=0) + 8)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "fontsize": TEXT}
    legend = figure.legend(handles.values(), handles, ncols=max(1, columns), **below)
    for text in legend.get_texts():
        text.set_parse_math(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, bbox_inches="tight")
    except OSError as error:  # a full disk: a failed write names no file
        error.filename = str(path)
        raise


def series(history: History, key: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a value, and their values."""
    points = [(r["step"], r[key]) for r in history if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: list[float]) -> list[float]:
    """Return the mean of each value and its neighbours in a centred window, cut at the ends."""
    reach = max(1, len(values) // SMOOTHED_POINTS // 2)
    smooth = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        window = values[index - side : index + side + 1]
        smooth.append(sum(window) / len(window))
    return smooth


def tokens_per_step(history: History) -> float:
    """Return the mean tokens per step of all ranks, 0 if they are not in the history."""
    steps, tokens = series(history, logged.TOKENS_SEEN)
    return tokens[-1] / steps[-1] if steps and steps[-1] else 0.0


def finish_axes(axes: Any, history: History) -> None:
    """Label the axis of steps, and add one of tokens above if their number is known."""
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    rate = tokens_per_step(history)
    if not rate:
        return
    from matplotlib.ticker import EngFormatter

    above = axes.secondary_xaxis("top", functions=(lambda x: x * rate, lambda x: x / rate))
    above.xaxis.set_major_formatter(EngFormatter(sep=""))
    above.set_xlabel("tokens")


def draw_losses(
    axes: Any, history: History, color: str, dots: str, name: str, dots_name: str = ""
) -> None:
    """Draw a run's training loss, each logged mean and smoothed, and its validation as dots."""
    steps, losses = series([r | {TRAIN_LOSS: train_loss(r)} for r in history], TRAIN_LOSS)
    axes.plot(steps, losses, color=color, **THIN)
    axes.plot(steps, smoothed(losses), color=color, label=name, **THICK)
    validation = series(history, logged.VALIDATION_LOSS)
    if validation[0]:
        axes.plot(*validation, color=dots, label=dots_name or None, **DOTS)
    axes.set_ylabel("loss (nats per token)")


def draw_curve(history: History, path: Path, title: str = "") -> Any:
    """Draw losses, unigram entropy and learning rate over steps and tokens into a PNG."""
    figure = new_figure()
    axes = figure.add_subplot()
    names = "training loss (thin: means of logged intervals)", "validation loss"
    draw_losses(axes, history, "tab:blue", "tab:orange", *names)
    sets, others = set_losses(history), itertools.cycle(_COLORS[4:])  # the first ones are taken
    for (name, key), color in zip(sets.items(), others, strict=False):
        axes.plot(*series(history, key), color=color, label=f"validation loss of {name}", **DOTS)
    if entropies := series(history, logged.UNIGRAM_ENTROPY)[1]:
        label = f"unigram entropy {entropies[-1]:.2f} nats"
        axes.axhline(entropies[-1], color="grey", linestyle="--", label=label)
    finish_axes(axes, history)
    right = axes.twinx()
    right.plot(*series(history, logged.RATE), "tab:green", lw=0.8, alpha=0.7, label="learning rate")
    right.set_ylabel("learning rate", color="tab:green")
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter("{x:g}")
    finish(figure, path, title)
    return figure


def draw_runs(runs: dict[str, History], path: Path) -> Any:
    """Draw the losses of several runs in one picture, over steps and tokens of the longest one."""
    figure = new_figure()
    axes = figure.add_subplot()
    colors = colors_of(list(runs))
    for name, history in runs.items():
        draw_losses(axes, history, colors[name], colors[name], escaped(name))
    tokens = {tokens_per_step(history) for history in runs.values()}
    # With different batches there is no common axis of tokens.
    longest = max(runs.values(), key=lambda history: max(series(history, TRAIN_LOSS)[0], default=0))
    finish_axes(axes, longest if len(tokens) == 1 else [])
    finish(figure, path, "training loss (thin: as logged); dots: validation loss")
    return figure
