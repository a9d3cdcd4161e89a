# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Show the stored runs of the spectral experiment: loss over learning rate, norms of updates.

    python -m scripts.research.spectral_pictures --size w48

Prints the best loss of each family and optimizer with its learning rate, and the rise of the loss
at the rates beside it. Writes docs/images/spectral_rates.png and spectral_norms.png, the norms of
each best run. All from scripts/research/experiments/spectral.json.

Exit status: 0; 2 invalid arguments.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from scripts.research.finished_runs import Run, stored_runs
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.figures import TITLE, finish, new_figure
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.run_state import FINISHED

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

FAMILIES = ("full", "svd", "cola", "lax")
OPTIMIZERS = ("AdamW", "Muon", "Spectron", "LoRAMuon")

_NAME = re.compile(r"(\w+)-(\w+)_(\w+)_[\d.]+_seed0_lr([\d.e-]+)")

Curves = dict[str, dict[str, dict[float, Run]]]
"""Runs by family, optimizer and learning rate."""


def searched(size: str) -> Curves:
    """Return the finished runs of seed 0 at equal tokens, of one size."""
    found: Curves = {family: {} for family in FAMILIES}
    for name, run in stored_runs("spectral").items():
        match = _NAME.fullmatch(name)
        if match and match[3] == size and run["row"]["status"] == FINISHED:
            found[match[1]].setdefault(match[2], {})[float(match[4])] = run
    return found


def best_of(runs: dict[float, Run]) -> Run:
    """Return the run with the lowest loss."""
    return min(runs.values(), key=lambda run: float(run["row"]["val_loss"]))


def measured(curves: Curves) -> Curves:
    """Return the curves whose best run has stored update norms; print what is left out."""
    found: Curves = {}
    for family, by_optimizer in curves.items():
        for optimizer, runs in by_optimizer.items():
            if best_of(runs)["update_norms"]:
                found.setdefault(family, {})[optimizer] = runs
            else:
                print(f"{family} with {optimizer}: its best run has no stored norms, left out")
    return found


def table(curves: Curves) -> str:
    """Return the best losses as Markdown: a row per family, a column per optimizer.

    In brackets stand the learning rate, and how much higher the loss is at the next lower and the
    next higher rate of the grid; a dash is a rate without a finished run.
    """
    rows = []
    for family, by_optimizer in curves.items():
        row = [family]
        for optimizer in OPTIMIZERS:
            runs = by_optimizer.get(optimizer, {})
            losses = {rate: run["row"]["val_loss"] for rate, run in runs.items()}
            row.append(best_loss(losses) if losses else "-")
        rows.append(row)
    return markdown_table(["family", *OPTIMIZERS], rows)


def best_loss(losses: dict[float, float]) -> str:
    """Return the text of one cell of `table`, from losses by rate."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda i: losses[rates[i]])
    best = losses[rates[place]]
    rises = []
    for beside in (place - 1, place + 1):
        known = 0 <= beside < len(rates)
        rises.append(f"+{losses[rates[beside]] - best:.2f}" if known else "-")
    return f"{best:.3f} ({rates[place]:g}; {', '.join(rises)})"


def draw(curves: Curves, what: str, panel: Any, path: Path) -> None:
    """Draw one panel per family, with a line per optimizer.

    Args:
        curves: Returned by `searched`.
        what: The title.
        panel: Draws the runs of one family and optimizer: axes, runs by rate, label and colour.
        path: The PNG to write.
    """
    figure = new_figure(2.5 * len(curves), 3.0)
    shared = None
    for place, (family, by_optimizer) in enumerate(curves.items()):
        axes = shared = figure.add_subplot(1, len(curves), place + 1, sharex=shared, sharey=shared)
        for optimizer, runs in by_optimizer.items():
            panel(axes, runs, optimizer, f"C{OPTIMIZERS.index(optimizer)}")
        axes.set_title(family, fontsize=TITLE)
        axes.grid(alpha=0.3)
    finish(figure, path, what)


def draw_rates(axes: Any, runs: dict[float, Run], label: str, color: str) -> None:
    """Draw validation losses over learning rates."""
    at = sorted(runs)
    axes.plot(at, [runs[rate]["row"]["val_loss"] for rate in at], "o-", ms=3, label=label, c=color)
    axes.set(xscale="log", xlabel="learning rate")


def draw_norms(axes: Any, runs: dict[float, Run], label: str, color: str) -> None:
    """Draw the update norms of the best run, in the order of the logged steps."""
    axes.plot(best_of(runs)["update_norms"], label=label, c=color)
    axes.set(yscale="log", xlabel="logged step")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Print the table and write both pictures; return the exit status."""
    parser = OneLineParser(prog="scripts.research.spectral_pictures", description=__doc__)
    parser.add_argument("--size", default="w48", help="a size of the experiment")
    parser.add_argument("--out", default=str(IMAGES), help="folder of the pictures")
    options: argparse.Namespace = parser.parse_args(argv)
    curves, out = searched(options.size), Path(options.out)
    if not any(curves.values()):
        raise ConfigError("--size", options.size, "a size with stored runs")
    print(table(curves))
    what = f"validation loss (nats per token) over learning rate, {options.size}, seed 0"
    draw(curves, what, draw_rates, out / "spectral_rates.png")
    what = f"largest spectral norm of a step's update, at the best learning rate, {options.size}"
    draw(measured(curves), what, draw_norms, out / "spectral_norms.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
