# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The common parts of all pictures: the figure, its axes, lines, legend and title."""

import re
import textwrap
from pathlib import Path
from typing import Any

DPI = 160  # with widths of about 7 inches, text of 8 points and more is legible at half width

WIDTH, HEIGHT = 6.6, 4.0
"""Inches of a picture with one panel; its legend comes on top of the height."""

TITLE, TEXT = 10, 8  # sizes of the letters, in points
THICK: dict[str, Any] = {"linewidth": 1.6}  # a smoothed or fitted line
THIN: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.4}  # the values as they were logged
DOTS: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": "none"}  # single measurements
_LABEL_LETTERS = 90  # a longer label is broken into lines

_UNLABELED = re.compile(r"_(child\d+|container\d+|nolegend_)")
"""What matplotlib calls lines and bars without a label; a run's folder may begin with "_" too."""

_MOST_COLUMNS = 4

SMOOTHED_POINTS = 20  # a smoothed curve averages over 1/20 of its points, at least over three

Series = tuple[list[float], list[float]]


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Any:
    """Return an empty figure, of inches, without a display or ``pyplot``'s global state."""
    # Imported late: matplotlib takes a second to import, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Any, path: Path, title: str = "") -> None:
    """Add the title above and the legend below all panels, where they cover no line; write the PNG.

    Their text is drawn as it is: a formula between two ``$`` that is none would be an error.
    """
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        # Not `get_legend_handles_labels`, which leaves out every label that begins with "_".
        for artist in (*axes.lines, *axes.patches, *axes.collections, *axes.containers):
            label = artist.get_label()
            if label and not _UNLABELED.fullmatch(label):
                handles.setdefault(textwrap.fill(label, _LABEL_LETTERS), artist)
    figure.set_layout_engine("constrained")
    if title:
        figure.suptitle(title, fontsize=TITLE, parse_math=False)
    for columns in range(min(len(handles), _MOST_COLUMNS), 0, -1):
        legend = figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=TEXT
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
            break
        legend.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except OSError as error:  # a full disk: a failed write names no file
        error.filename = str(path)
        raise


def series(history: list[dict[str, Any]], key: str) -> Series:
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
