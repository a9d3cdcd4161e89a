# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Matplotlib figures for a run's curve and for the tools' pictures."""

from typing import Any

DPI = 130


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that uses neither a display nor ``pyplot``'s global state.

    Args:
        width: Width in inches.
        height: Height in inches.

    Returns:
        A `matplotlib.figure.Figure` whose ``savefig`` writes a PNG of `DPI` dots per inch.
    """
    # Imported late: matplotlib takes a second to import, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure
