# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pictures that compare runs: the losses of several ones, and the colours of the methods."""

from pathlib import Path
from typing import Any

from torchtitan_lr.console.figures import finish_axes, new_figure, series, smoothed, tokens_per_step
from torchtitan_lr.errors import escaped
from torchtitan_lr.training.history import TRAIN_LOSS, VALIDATION_LOSS

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


def color_of(name: str, place: int = 0) -> str:
    """Return the colour of a method."""
    name = name.replace("-", " ").lower()
    known = [key for key in COLORS if f"{name} ".startswith(f"{key.lower()} ")]
    return COLORS[max(known, key=len)] if known else f"C{place}"


def draw_runs(runs: dict[str, list[dict[str, Any]]], path: Path) -> Any:
    """Draw the losses of several runs in one picture, over steps and tokens of the longest one."""
    figure = new_figure(6.6, 4.4)
    axes = figure.add_subplot()
    for place, (name, history) in enumerate(runs.items()):
        train, color = series(history, TRAIN_LOSS), color_of(name, place)
        label = escaped(name).replace("$", r"\$")  # a formula otherwise, and an error if it is none
        axes.plot(train[0], smoothed(train[1]), linewidth=1.6, label=label, color=color)
        axes.plot(*train, color=color, linewidth=0.6, alpha=0.3)
        validation = series(history, VALIDATION_LOSS)
        style = {"color": color, "marker": "o", "markersize": 4}
        axes.plot(*validation, linestyle="none", **style)
    axes.set_ylabel("loss (nats per token); dots: validation")
    tokens = {tokens_per_step(history) for history in runs.values()}
    # With different batches there is no common axis of tokens.
    longest = max(runs.values(), key=lambda history: max(series(history, TRAIN_LOSS)[0], default=0))
    finish_axes(axes, longest if len(tokens) == 1 else [])
    axes.legend(fontsize=8)
    axes.set_title("training loss, thin: as logged, thick: smoothed", fontsize=10)
    figure.set_layout_engine("constrained")  # leaves room for the upper axis and the title
    figure.savefig(path)
    return figure
