# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write the tables of docs/results.md from the stored runs of the experiments.

    python -m scripts.research.result_tables

What scripts/research/experiments/NAME.json says stands between the lines `<!-- table: NAME -->` and
`<!-- end of table: NAME -->` of the page.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from scripts.research import finished_runs
from scripts.research.finished_runs import restore, stored_runs
from scripts.support_table import insert
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.commands.scaling import losses_of
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.report import Row, rows_of, with_interval
from torchtitan_lr.scaling.sweep import Sweep

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"

MEASURES = {
    "tokens": "At equal tokens, {budget:g} per parameter of {reference}",
    "flops": "At equal FLOPs, those of {reference} with {budget:g} tokens per parameter",
    "tokens_per_parameter": "At {budget:g} tokens per parameter",
}
"""Titles of tables by what the families share."""


def stored_rows(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the reference of an experiment, and the rows of `scaling fit` from its stored runs.

    Raises:
        ConfigError: The stored runs have other settings than the experiment's file.
    """
    experiment = read_experiment(str(finished_runs.FOLDER / f"{name}.toml"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        restore(name, work)
        plan = Plan(experiment, work)
        rates, _ = plan.rates(losses_of(work))
        points = plan.main_points(rates)
        Sweep(work, points)  # reads the results, and refuses those of other settings
        return experiment.reference, rows_of(points, experiment.reference)


def section(name: str) -> str:
    """Return what stands between the markers of an experiment: its tables and their origin."""
    reference, rows = stored_rows(name)
    known = [row for row in rows if row["losses"]]
    groups: dict[str, list[Row]] = {}
    for row in known:
        budget = row["tokens_per_parameter"]
        title = MEASURES[row["equal"]].format(budget=budget, reference=reference)
        groups.setdefault(title, []).append(row)
    parts = []
    for title, group in groups.items():
        parts += [f"{title}:", table(group, reference)]
    seeds = sorted({seed for row in known for seed in row["losses"]})
    return "\n\n".join([*parts, origin(name, seeds)])


def table(rows: Sequence[Row], reference: str) -> str:
    """Return a Markdown table: a row per family, two columns per size.

    Args:
        rows: Those of one budget and one shared measure.
        reference: The family that is subtracted.
    """
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    header = ["family"]
    for size in sizes:
        of_size = f"{size}: " if len(sizes) > 1 else ""
        header += [f"{of_size}loss (learning rate)", f"{of_size}minus {reference} [95%]"]
    lines: dict[str, list[str]] = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        lines[family] = [family]
        for size in sizes:
            found = [row for row in rows if (row["family"], row["size"]) == (family, size)]
            lines[family] += cells(found[0]) if found else ["-", "-"]
    return markdown_table(header, list(lines.values()))


def cells(row: Row) -> list[str]:
    """Return the mean loss ± the seeds' deviation with its rate, and the difference."""
    losses = list(row["losses"].values())
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    text = f"{row['loss'][0]:.3f}{spread} ({row['learning_rate']:g})"
    return [text, with_interval(row["minus_reference"], "+.3f")]


def origin(name: str, seeds: Sequence[int]) -> str:
    """Return a line that says where the runs of an experiment come from, and how to repeat them."""
    runs = stored_runs(name).values()
    pairs = sorted({(run["commit"], run["torch"]) for run in runs})
    versions = "; ".join(f"commit {commit}, torch {torch}" for commit, torch in pairs)
    numbers = ", ".join(map(str, seeds))
    return f"{len(runs)} runs, seeds {numbers}; {versions}; `scripts/research/results.sh {name}`."


def names() -> list[str]:
    """Return the experiments that have stored runs."""
    return sorted(path.stem for path in finished_runs.FOLDER.glob("*.json"))


def with_tables(page: str, name: str) -> str:
    """Return a page with the tables of an experiment.

    Raises:
        ValueError: The page has no place for them.
    """
    begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
    return insert(page, f"\n{section(name)}\n", begin, end)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Write the tables; return the exit status."""
    OneLineParser(prog="scripts.research.result_tables", description=__doc__).parse_args(argv)
    page = PAGE.read_text()
    for name in names():
        page = with_tables(page, name)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
