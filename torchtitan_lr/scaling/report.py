# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What an experiment will cost and what it found: tables, JSON and the picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from torchtitan_lr.console.tables import markdown_table, text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.parameters import at_equal_parameters
from torchtitan_lr.scaling.pictures import draw
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.points import AXES, Fit, Point, compare, fit_family, points_of

MARKDOWN, JSON, PICTURE = "scaling.md", "scaling.json", "scaling.png"


def plan_rows(plan: Plan, rate: float) -> list[dict[str, Any]]:
    """Return the runs by family, size and budget, with what each costs.

    Args:
        plan: The plan.
        rate: FLOPs per second of one run; 0 if unknown.
    """
    rows: dict[tuple[str, str, float], dict[str, Any]] = {}
    for run in plan.runs():
        cost, steps = plan.costs[run.family, run.size], plan.steps(run)
        row = rows.setdefault(
            (run.family, run.size, run.budget),
            {
                "family": run.family,
                "size": run.size,
                "tokens_per_parameter": run.budget,
                "runs": 0,
                "done": 0,
                "all_parameters": cost.parameters,
                "parameters": cost.counted,
                "steps": steps,
                "flops": plan.flops(run),
                "bytes": cost.bytes_per_step * steps,
                "modelled_seconds": cost.seconds_per_step * steps,
                "expected_seconds": plan.flops(run) / rate if rate else None,
            },
        )
        row["runs"] += 1
        row["done"] += plan.is_done(run)
    return list(rows.values())


def plan_text(plan: Plan, rows: Sequence[dict[str, Any]], jobs: int, source: str) -> str:
    """Return the table of `plan_rows` with its totals.

    Args:
        plan: The plan.
        rows: Returned by `plan_rows`.
        jobs: Runs at once.
        source: Where the expected seconds come from.
    """
    header = ["family", "size", "tokens/N", "runs", "done", "N", "all parameters", "steps"]
    header += ["FLOPs per run", "MB per run", "modelled s", "expected s"]
    cells = []
    for row in rows:
        expected = row["expected_seconds"]
        cells.append(
            [
                *(row["family"], row["size"], f"{row['tokens_per_parameter']:g}"),
                *(str(row["runs"]), str(row["done"])),
                *(f"{row[key]:,}" for key in ("parameters", "all_parameters", "steps")),
                *(f"{row['flops']:.3g}", f"{row['bytes'] / 1e6:,.1f}"),
                f"{row['modelled_seconds']:,.1f}",
                "-" if expected is None else f"{expected:,.0f}",
            ]
        )
    left = [row["runs"] - row["done"] for row in rows]
    flops = sum(n * row["flops"] for n, row in zip(left, rows, strict=True))
    lines = [text_table(header, cells, left=2)]
    total = f"{sum(left)} runs to do, {flops:.3g} FLOPs"
    if source:
        parts = [n * row["expected_seconds"] for n, row in zip(left, rows, strict=True)]
        # Runs at once share the machine's cores; the rate is that of one run.
        total += f", {sum(parts) / jobs / 3600:.2f} h expected with {jobs} at once ({source})"
    lines.append(total)
    unknown = [name for name, choice in plan.chosen().items() if choice.search is not None]
    unknown = [name for name in unknown if plan.chosen()[name].rate is None]
    if unknown:
        names = ", ".join(" ".join(name) for name in unknown)
        lines.append(f"learning rates still to search: {names}; a grid may grow")
    return "\n".join(lines)


def edges_of(plan: Plan) -> list[str]:
    """Return one line for each search whose least loss is at an edge of its grid."""
    lines = []
    for (family, size), choice in plan.chosen().items():
        if choice.search is not None and choice.search.edge is not None:
            edge, grid = choice.search.edge, choice.search.grid
            lines.append(
                f"{family} {size}: learning rate {edge:g} is an edge of its grid "
                f"({grid[0]:g} to {grid[-1]:g}) and no best: widen the grid"
            )
    return lines


def results(plan: Plan, draws: int, huber: float, whole: bool) -> dict[str, Any]:
    """Fit all families and return what was found.

    Args:
        plan: The plan, with its finished runs.
        draws: Number of bootstrap fits.
        huber: As in `fit.fit_law`.
        whole: Fit all points, and not only those that no cheaper one beats.

    Returns:
        ``points``, ``fits`` (of `Fit`), ``comparisons`` (of `points.compare`), ``parameters`` (of
        `at_equal_parameters`), ``commits``, ``edges`` and ``skipped``.

    Raises:
        ConfigError: No run has finished.
    """
    points = points_of(plan)
    if not points:
        raise ConfigError("--out", str(plan.work), "a folder with finished runs of the experiment")
    fits, skipped = [], []
    for family in plan.experiment.families:
        own = [point for point in points if point.family == family]
        for axes in [*((axis,) for axis in AXES), ("parameters", "tokens")]:
            fit = fit_family(family, own, axes, draws, huber, whole)
            if fit is None:
                skipped.append(f"{family} over {', '.join(axes)}")
            else:
                fits.append(fit)
    by_flops = [fit for fit in fits if fit.axes == ("flops",)]
    return {
        "points": points,
        "fits": fits,
        "comparisons": compare(by_flops, points, "flops"),
        "parameters": at_equal_parameters(points, plan.experiment.first),
        "commits": plan.commits(plan.main_runs()),
        "edges": edges_of(plan),
        "skipped": skipped,
    }


def as_json(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return results as JSON."""
    values = dict(found) | {
        "experiment": asdict(plan.experiment),
        "points": [
            asdict(point) | {"loss": point.loss, "losses": point.losses}
            for point in found["points"]
        ],
        "fits": [fit.as_dict() for fit in found["fits"]],
        "searches": [
            {"family": family, "size": size, "rate": choice.rate, "how": choice.how}
            | ({} if choice.search is None else {"losses": _losses(choice.search.losses)})
            for (family, size), choice in plan.chosen().items()
        ],
    }
    return json.dumps(values, indent=1)


def _losses(losses: Mapping[float, float]) -> dict[str, float | None]:
    finite = math.isfinite
    return {f"{rate:g}": loss if finite(loss) else None for rate, loss in losses.items()}


def as_markdown(plan: Plan, found: Mapping[str, Any]) -> str:
    """Return results as Markdown: points, laws and comparisons, with what limits them."""
    parts = [f"# {plan.experiment.name}", plan.experiment.description, _points(found["points"])]
    if found["fits"]:
        parts.append(laws_table(found["fits"]))
    if found["comparisons"]:
        parts.append(comparisons_table(found["comparisons"]))
    if found["parameters"]:
        parts.append(parameters_table(found["parameters"], plan.experiment.first))
    if found["skipped"]:
        parts.append(f"Too few points for a law: {'; '.join(found['skipped'])}.")
    mixed = "**The runs are of different commits**: " if len(found["commits"]) > 1 else "Commit: "
    parts.append(mixed + counted(found["commits"]) + ".")
    parts += [f"Edge: {line}." for line in found["edges"]]
    return "\n\n".join(part for part in parts if part)


def counted(commits: Mapping[str, int]) -> str:
    """Return commits with their numbers of runs."""
    return ", ".join(f"{commit} ({count} runs)" for commit, count in commits.items())


def _points(points: Sequence[Point]) -> str:
    header = ["family", "size", "tokens/N", "learning rate", "N", "D", "FLOPs", "MB sent"]
    header += ["modelled s", "seeds", "validation loss", "sd"]
    rows = []
    for p in points:
        spread = f"{np.std(p.losses, ddof=1):.4f}" if len(p.losses) > 1 else "-"
        rows.append(
            [
                *(p.family, p.size, f"{p.budget:g}", f"{p.rate:g}", f"{p.parameters:,}"),
                *(f"{p.tokens:,.0f}", f"{p.flops:.3g}", f"{p.bytes / 1e6:,.1f}"),
                *(f"{p.seconds:,.2f}", f"{len(p.losses)}/{p.wanted}", f"{p.loss:.4f}", spread),
            ]
        )
    return markdown_table(header, rows)


def laws_table(fits: Sequence[Fit]) -> str:
    """Return the fitted laws as Markdown, with 95% intervals."""
    header = ["family", "over", "points", "E", "alpha", "beta"]
    rows = []
    for fit in fits:
        values = fit.values()
        shown = [
            f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]" if value else "-"
            for value in (values.get(name) for name in ("E", "alpha", "beta"))
        ]
        rows.append([fit.family, " and ".join(fit.axes), str(fit.points), *shown])
    return markdown_table(header, rows)


def comparisons_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the differences of `points.compare` as Markdown."""
    header = ["at equal FLOPs", "loss of", "minus", "difference", "share of fits below 0"]
    return markdown_table(
        header,
        [
            [
                *(f"{row['at']:.3g}", row["first"], row["second"]),
                f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]",
                f"{100 * row['first_is_lower']:.0f}%",
            ]
            for row in rows
        ],
    )


def parameters_table(rows: Sequence[dict[str, Any]], reference: str) -> str:
    """Return the rows of `at_equal_parameters` as Markdown.

    Args:
        rows: The rows.
        reference: The family that the others are compared with.
    """
    header = ["N", "family", f"FLOPs / {reference}'s", f"tokens / {reference}'s", "loss"]
    lines = []
    for row in sorted(rows, key=lambda row: float(row["parameters"])):
        text = f"{row['difference']:+.3f}"
        if row["low"] is not None:
            text += f" [{row['low']:+.3f}, {row['high']:+.3f}]"
        ratios = (f"{row['flops']:.2f}", f"{row['tokens']:.2f}")
        n = f"{row['parameters']:,}"
        lines.append([n, row["family"], *ratios, f"{row['loss']:.3f}", text])
    return markdown_table([*header, f"minus {reference} of equal N [95%]"], lines)


def write(plan: Plan, found: Mapping[str, Any]) -> None:
    """Write the table, JSON and picture into the plan's folder."""
    (plan.work / MARKDOWN).write_text(as_markdown(plan, found) + "\n")
    (plan.work / JSON).write_text(as_json(plan, found) + "\n")
    draw(plan, found, plan.work / PICTURE)
