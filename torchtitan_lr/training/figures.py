# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The one place that makes a matplotlib figure: a run's curve and the tools' pictures use it.

It stands here because a run draws its own curve, and tools import from training.
"""

from typing import Any

DPI = 130


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display and no global state of ``pyplot``.

    Args:
        width: In inches.
        height: In inches.

    Returns:
        A `matplotlib.figure.Figure` whose ``savefig`` writes a PNG of `DPI` dots per inch.
    """
    # Late: matplotlib takes a second to import, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure
