# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write the tables of docs/results.md from stored runs.

    python -m scripts.research.result_tables
    python -m scripts.research.result_tables recipe
    python -m scripts.research.result_tables recipe --minus cola-Spectron

What scripts/research/experiments/NAME.json says stands between the lines `<!-- table: NAME -->` and
`<!-- end of table: NAME -->` of the page. Tables without a place there are printed, and those with
--minus.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

from scripts.research import finished_runs
from scripts.research.finished_runs import plan_of, restore, stored_runs, versions_text
from scripts.support_table import insert
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.terminal import markdown_table
from torchtitan_lr.errors import require
from torchtitan_lr.experiments.results import Row, rows_of, with_interval
from torchtitan_lr.experiments.sweep import losses_of, read_results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"

MEASURES = {
    "tokens": "At equal tokens, {budget:g} per parameter of {reference}",
    "flops": "At equal FLOPs, those of {reference} with {budget:g} tokens per parameter",
    "tokens_per_parameter": "At {budget:g} tokens per parameter",
}
"""Titles of tables by what the families share."""


@dataclass(frozen=True)
class Results:
    """What the stored runs of an experiment say."""

    reference: str  # whose tokens or FLOPs the families share
    compared: str  # the family that is subtracted
    rows: Sequence[Row]  # those of `torchtitan-lr scaling fit` that have a finished run


def results_of(name: str, minus: str | None = None) -> Results:
    """Read the stored runs of an experiment, to be compared with its reference or another family.

    Raises:
        ConfigError: They have other settings than the experiment's file.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        plan = plan_of(name, work)
        restore(name, plan)
        points = plan.main_points(plan.searched(losses_of(work)).rates)
        read_results(work, points)
    experiment = plan.experiment
    compared = minus or experiment.reference
    require(compared in experiment.families, "--minus", compared, "a family of the experiment")
    rows = [row for row in rows_of(points, compared) if row["losses"]]
    return Results(experiment.reference, compared, rows)


def section(name: str, minus: str | None = None) -> str:
    """Return what stands between the markers of an experiment: its tables and their origin."""
    results = results_of(name, minus)
    parts = []
    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        budget = row["tokens_per_parameter"]
        title = MEASURES[row["equal"]].format(budget=budget, reference=results.reference)
        groups.setdefault(title, []).append(row)
    for title, group in groups.items():
        parts += [f"{title}:[^{name}]", table(group, results.compared)]
    seeds = sorted({seed for row in results.rows for seed in row["losses"]})
    return "\n\n".join([*parts, origin(name, seeds)])


def table(rows: Sequence[Row], reference: str) -> str:
    """Return a Markdown table of the losses at one budget: a row per family, two cells per size."""
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
    """Return the footnote: where the runs come from, and how to repeat them."""
    runs = stored_runs(name).values()
    where, numbers = versions_text(runs), ", ".join(map(str, seeds))
    command = f"scripts/research/results.sh {name}"
    return f"[^{name}]: {len(runs)} runs, seeds {numbers}; {where}; `{command}`."


def names() -> list[str]:
    """Return the experiments with stored runs."""
    return sorted(path.stem for path in finished_runs.FOLDER.glob("*.json"))


def placed(page: str) -> list[str]:
    """Return the experiments with stored runs whose tables have a place on the page."""
    return [name for name in names() if f"<!-- table: {name} -->" in page]


def with_tables(page: str, name: str) -> str:
    """Return a page with the tables of an experiment.

    Raises:
        ConfigError: The page has no place for them.
    """
    begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
    return insert(PAGE, page, f"\n{section(name)}\n", begin, end)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Write the tables; return the exit status."""
    parser = OneLineParser(prog="scripts.research.result_tables", description=__doc__)
    parser.add_argument("name", nargs="?", choices=names(), help="by default all on the page")
    parser.add_argument("--minus", metavar="FAMILY", help="another family to compare with")
    options = parser.parse_args(argv)
    if options.minus:
        require(options.name is not None, "--minus", options.minus, "a NAME before it")
        print(section(options.name, options.minus))
        return 0
    page = PAGE.read_text()
    for name in [options.name] if options.name else placed(page):
        if name in placed(page):
            page = with_tables(page, name)
        else:
            print(section(name))
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
