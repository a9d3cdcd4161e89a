# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parts of a page that an experiment writes: tables, the picture, and where they come from.

A page holds the claim and what follows from the runs, written by hand. Between the lines
``<!-- scaling NAME: PART -->`` and ``<!-- end -->`` it holds a part of the experiment NAME, which
`fill_in` replaces. `PARTS` has their names.
"""

import re
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.checkpoints.layout import complete_steps, step_folder
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.fit import student
from torchtitan_lr.scaling.pictures import draw
from torchtitan_lr.scaling.plan import FINISHED, Plan, Run
from torchtitan_lr.scaling.points import Point
from torchtitan_lr.scaling.report import (
    comparisons_table,
    counted,
    laws_table,
    parameters_table,
)
from torchtitan_lr.scaling.shapes import model_of
from torchtitan_lr.training.figures import series
from torchtitan_lr.training.history import HISTORY_FILE, TRAIN_LOSS, read_history

_BLOCK = r"(<!-- scaling {}: (\w+) -->\n).*?(<!-- end -->)"


def differences(points: Sequence[Point], reference: str) -> dict[tuple[str, str, float], str]:
    """Return the differences of losses from a reference at the same size and budget.

    Losses are paired by seed, so what seeds share (order of the data) cancels. The spread is pooled
    over the families of a size and budget, as three seeds alone hardly determine it.

    Args:
        points: All points.
        reference: The family.

    Returns:
        Text by family, size and budget: the mean and, with several seeds, its 95% interval.
    """
    key = lambda point: (point.size, point.budget)  # noqa: E731
    found = {}
    for _, group in groupby(sorted(points, key=key), key=key):
        own = list(group)
        first = next((point for point in own if point.family == reference), None)
        if first is None:
            continue
        pairs = {
            point.family: np.asarray([point.seeds[s] - first.seeds[s] for s in point.seeds])
            for point in own
            if point is not first and set(point.seeds) <= set(first.seeds)
        }
        freedom = sum(len(values) - 1 for values in pairs.values())
        squares = sum(float(((v - v.mean()) ** 2).sum()) for v in pairs.values())
        for family, values in pairs.items():
            text = f"{values.mean():+.3f}"
            if freedom and len(values) > 1:
                half = student(freedom) * (squares / freedom / len(values)) ** 0.5
                text += f" [{values.mean() - half:+.3f}, {values.mean() + half:+.3f}]"
            found[family, own[0].size, own[0].budget] = text
    return found


def table(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the losses of all points, with their differences from the reference."""
    experiment, points = plan.experiment, found["points"]
    reference = experiment.first
    minus = differences(points, reference)
    header = ["family", "size", "learning rate", "steps", "FLOPs", "MB sent", "seeds"]
    header += ["validation loss", f"minus {reference} [95%]"]
    rows = []
    for p in sorted(points, key=lambda p: (list(experiment.sizes).index(p.size), p.budget)):
        spread = f" ± {np.std(p.losses, ddof=1):.4f}" if len(p.losses) > 1 else ""
        steps = plan.steps(Run(p.family, p.size, p.budget, 0, p.rate))
        rows.append(
            [
                *(p.family, p.size, f"{p.rate:g}", f"{steps:,}", f"{p.flops:.3g}"),
                *(f"{p.bytes / 1e6:,.0f}", f"{len(p.losses)} of {p.wanted}"),
                *(f"{p.loss:.4f}{spread}", minus.get((p.family, p.size, p.budget), "")),
            ]
        )
    return markdown_table(header, rows)


def halves(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return each family's loss at some FLOPs minus the reference's at twice as many."""
    experiment, points = plan.experiment, found["points"]
    reference = experiment.first
    full = [point for point in points if point.family == reference]
    rows = []
    for p in points:
        for other in full:
            if other.size != p.size or not 1.9 < other.flops / p.flops < 2.1:
                continue
            seeds = [s for s in p.seeds if s in other.seeds]
            gaps = np.asarray([p.seeds[s] - other.seeds[s] for s in seeds])
            text = f"{gaps.mean():+.3f}"
            if len(gaps) > 1:
                half = student(len(gaps) - 1) * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
                text += f" [{gaps.mean() - half:+.3f}, {gaps.mean() + half:+.3f}]"
            tokens = f"{p.tokens / other.tokens:.2f}"
            rows.append([p.family, p.size, f"{p.flops:.3g}", tokens, str(len(gaps)), text])
    header = ["family", "size", "FLOPs", f"tokens / {reference}'s", "seeds"]
    return markdown_table([*header, f"minus {reference} at twice the FLOPs [95%]"], rows)


def shapes(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the widths and parameters of each family at each size."""
    experiment = plan.experiment
    rows = []
    for (family, size), cost in plan.costs.items():
        sides = ["", ""]
        if not experiment.sizes[size].flavor:
            args = model_of(experiment, family, size)
            sides = [str(args.ffn_dim), str(args.rank_ffn or "")]
        numbers = (cost.counted, cost.parameters, cost.flops_per_token)
        rows.append([family, size, str(cost.width), *sides, *(f"{n:,}" for n in numbers)])
    rows.sort(key=lambda row: list(experiment.sizes).index(row[1]))
    header = ["family", "size", "d", "f", "r", "N", "all parameters", "FLOPs per token"]
    return markdown_table(header, rows)


def parameters(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the families' losses at the parameters of the reference, by interpolation."""
    if not found["parameters"]:
        return "Too few sizes to interpolate."
    return parameters_table(found["parameters"], plan.experiment.first)


def gaps(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the mean absolute difference of training losses of two families, and of two seeds."""
    experiment = plan.experiment
    first = experiment.first
    curves: dict[tuple[str, int], Any] = {}
    for run in plan.main_runs():
        if plan.records.get(run.name, {}).get("status") == FINISHED:
            history = read_history(plan.folder(run) / HISTORY_FILE)
            curves[run.family, run.seed] = np.asarray(series(history, TRAIN_LOSS)[1])
    rows = []
    for one, two in combinations(curves, 2):
        if curves[one].shape != curves[two].shape:
            continue
        if one[0] == two[0] == first or (first in (one[0], two[0]) and one[1] == two[1]):
            gap = curves[one] - curves[two]
            who = [f"{family}, seed {seed}" for family, seed in (one, two)]
            late = gap[len(gap) // 2 :]
            values = [f"{np.abs(gap).mean():.4f}", f"{gap.mean():+.4f}", f"{late.mean():+.4f}"]
            rows.append([*who, *values])
    header = ["training loss of", "minus", "mean absolute difference", "mean", "mean, second half"]
    return markdown_table(header, rows)


def ranks(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the effective rank of activations at the checkpoints of each family's first run.

    r(0.95) is the number of singular values with 95% of an activation matrix's energy (CoLA,
    equation 1), here divided by the matrix's width and averaged over blocks and projections.
    """
    from scripts.research.activation_rank import measure  # late: it loads models

    rows = []
    for run in _first_runs(plan):
        folder = plan.folder(run) / "checkpoint"
        for step in complete_steps(folder):
            given = {"checkpoint": Path(step_folder(folder, step)), "alpha": [0.95], "tokens": 4096}
            given |= {"seq_len": 0, "text": None, "config": None, "device": "cpu"}
            measured = measure(Namespace(**given))
            cells = []
            for what in ("output", "latent"):
                own = [r["rank"]["0.95"] / r["width"] for r in measured if r["what"] == what]
                cells.append(f"{np.mean(own):.2f}" if own else "")
            rows.append([run.family, str(step), *cells])
    header = ["family", "step", "outputs of projections", "latents, of r"]
    return markdown_table(header, rows)


def _first_runs(plan: Plan) -> list[Run]:
    """Return the finished run of each family with the least seed, at the last size and budget."""
    found: dict[str, Run] = {}
    for run in sorted(plan.main_runs(), key=lambda run: -run.seed):
        if plan.records.get(run.name, {}).get("status") == FINISHED:
            found[run.family] = run
    return [found[family] for family in plan.experiment.families if family in found]


def searches(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the validation losses of the searches by learning rate; the best is bold."""
    rows = []
    for (family, size), choice in plan.chosen().items():
        if choice.search is None or not choice.search.losses:
            continue
        cells = []
        for rate, loss in sorted(choice.search.losses.items()):
            cell = f"{rate:g}: {loss:.3f}" if np.isfinite(loss) else f"{rate:g}: diverged"
            cells.append(f"**{cell}**" if rate == choice.rate else cell)
        state = "" if choice.rate is not None else " (not finished)"
        rows.append([family, size, ", ".join(cells) + state])
    return markdown_table(["family", "size", "learning rate: validation loss"], rows)


def laws(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return the fitted laws and the families' differences at equal FLOPs."""
    parts = [laws_table(found["fits"])] if found["fits"] else ["Too few points for a law."]
    if found["comparisons"]:
        parts.append(comparisons_table(found["comparisons"]))
    return "\n\n".join(parts)


def source(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return where the figures come from: runs, commit, machine and processor time."""
    records = [plan.records[run.name] for run in plan.runs() if run.name in plan.records]
    done = [record for record in records if record["status"] == FINISHED]
    machines = dict.fromkeys(_machine(record) for record in done)
    seconds = sum(record["row"].get("cpu_seconds", 0.0) for record in done)
    commits = plan.commits(plan.runs())
    mixed = f"**different commits**, {counted(commits)}," if len(commits) > 1 else ""
    main = plan.main_runs()
    finished = sum(run.rate is not None and plan.is_done(run) for run in main)
    state = "" if finished == len(main) else " **The experiment is not finished.**"
    seeds = sorted({run.seed for run in main})
    text = (
        f"{finished} of {len(main)} runs, and {len(done)} with those of searches, with seeds "
        f"{', '.join(map(str, seeds))} at "
        f"{mixed or 'commit ' + ', '.join(commits)} on {'; '.join(machines)}; "
        f"{seconds / 60:.0f} minutes of one core.{state}"
    )
    return textwrap.fill(text, 100)


def _machine(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    device = machine["device"] or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{device}, torch {machine['torch']}, Python {machine['python']}"


PARTS: dict[str, Callable[[Plan, Mapping[str, Any]], str]] = {
    "table": table,
    "halves": halves,
    "parameters": parameters,
    "shapes": shapes,
    "gaps": gaps,
    "ranks": ranks,
    "searches": searches,
    "laws": laws,
    "source": source,
}
"""What a page may hold, by name; ``picture`` is the other one."""


def fill_in(plan: Plan, found: Mapping[str, Any], page: Path) -> None:
    """Write an experiment's parts into a page, and its picture beside the page's others.

    Args:
        plan: The plan.
        found: Returned by `report.results`.
        page: The page, below a folder of documents with the folder ``images``.

    Raises:
        ConfigError: The page cannot be read, or has no part of the experiment.
    """
    name = plan.experiment.name
    images = page.parent.parent / "images"

    def part(match: re.Match[str]) -> str:
        if match[2] == "picture":
            images.mkdir(exist_ok=True)
            draw(plan, found, images / f"scaling_{name}.png")
            text = f"![{plan.experiment.description}](../images/scaling_{name}.png)"
        elif match[2] in PARTS:
            text = PARTS[match[2]](plan, found)
        else:
            raise ConfigError("--page", match[2], f"one of picture, {', '.join(PARTS)}")
        return f"{match[1]}\n{text}\n\n{match[3]}"

    try:
        old = page.read_text()
    except OSError as error:
        raise ConfigError("--page", str(page), f"a page ({error.strerror})") from error
    new, count = re.subn(_BLOCK.format(re.escape(name)), part, old, flags=re.DOTALL)
    if not count:
        raise ConfigError("--page", str(page), f"a page with <!-- scaling {name}: table -->")
    page.write_text(new)
