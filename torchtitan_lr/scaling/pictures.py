# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pictures that compare runs: the losses of several ones, and the colours of the methods."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_lr.console.figures import finish, new_figure, series
from torchtitan_lr.errors import escaped
from torchtitan_lr.training.history import (
    TRAIN_LOSS,
    draw_losses,
    finish_axes,
    tokens_per_step,
)

# The runs with which the others are compared.
_BASES = ("full", "AdamW", "dense", "p1", "one process")

COLORS = {
    **dict.fromkeys(_BASES, "black"),
    **{"svd": "tab:blue", "cola": "tab:orange", "lax": "tab:green"},
    **{"GaLore": "tab:blue", "TSR keep": "tab:orange", "TSR rotate": "tab:green"},
    **{"TSR reset": "tab:red", "BTP": "tab:orange", "vanilla": "tab:purple"},
    **{"megatron": "tab:brown", "CAAT Net": "tab:pink"},
    **{"sketch": "tab:purple", "sparse": "tab:olive"},
    **{"4 lanes": "tab:blue", "8 lanes": "tab:orange"},
    **{"top k": "tab:cyan", "random": "tab:olive", "another seed": "tab:gray"},
}
"""The colour of a method in every picture that compares methods; a hyphen is a blank."""


_OTHERS = (
    *(f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "pink")),
    *("tab:olive", "tab:cyan", "tab:gray", "navy", "gold", "lime", "darkred", "plum", "teal"),
)
"""Colours of methods that `COLORS` does not name, or that share their colour with another."""


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return the colours of the methods of one picture: all different, as far as there are some."""
    known: dict[str, str] = {}
    for name in names:
        text = name.replace("-", " ").lower() + " "
        methods = [key for key in COLORS if text.startswith(f"{key.lower()} ")]
        if methods and (color := COLORS[max(methods, key=len)]) not in known.values():
            known[name] = color
    free = [color for color in _OTHERS if color not in known.values()] or list(_OTHERS)
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    return known | dict(zip(unknown, itertools.cycle(free), strict=False))


def draw_runs(runs: dict[str, list[dict[str, Any]]], path: Path) -> Any:
    """Draw the losses of several runs in one picture, over steps and tokens of the longest one."""
    figure = new_figure()
    axes = figure.add_subplot()
    colors = colors_of(list(runs))
    for name, history in runs.items():
        draw_losses(axes, history, colors[name], colors[name], escaped(name), "")
    tokens = {tokens_per_step(history) for history in runs.values()}
    # With different batches there is no common axis of tokens.
    longest = max(runs.values(), key=lambda history: max(series(history, TRAIN_LOSS)[0], default=0))
    finish_axes(axes, longest if len(tokens) == 1 else [])
    finish(figure, path, "training loss (thin: as logged); dots: validation loss")
    return figure
