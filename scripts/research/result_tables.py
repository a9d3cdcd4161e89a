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
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.terminal import markdown_table
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.messages import element_size
from torchtitan_lr.costs.step_time import WIRE_SHARE
from torchtitan_lr.costs.step_traffic import averaged, step_traffic
from torchtitan_lr.errors import require
from torchtitan_lr.experiments.results import Row, rows_of, with_interval
from torchtitan_lr.experiments.sweep import Point, losses_of, read_results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"

MEASURES = {
    "tokens": "At equal tokens, {budget:g} per parameter of {reference}",
    "flops": "At equal FLOPs, those of {reference} with {budget:g} tokens per parameter",
    "tokens_per_parameter": "At {budget:g} tokens per parameter",
}
"""Titles of tables by what the families share."""


REPLICAS = {"outer": ("outer", "outer_4")}
"""Experiments that share a table, of other numbers of replicas; it has the bytes between them."""

NEAR = 0.02
"""How far a loss may be above the reference's."""


@dataclass(frozen=True)
class Results:
    """What the stored runs of an experiment say."""

    reference: str  # whose tokens or FLOPs the families share
    compared: str  # the family that is subtracted
    rows: Sequence[Row]  # those of `torchtitan-lr scaling fit` that have a finished run


def results_of(name: str, minus: str | None = None, replicas: bool = False) -> Results:
    """Read an experiment's stored runs, compared with its reference or with another family.

    One of `REPLICAS` has what they send. A ConfigError says that they have other settings than the
    experiment's file.
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
        done = {p.settings["family"]: p for p in points if p.is_done} if replicas else {}
        sent = {family: sent_bytes(point) for family, point in done.items()}
    if replicas:
        size = {"size": f"{experiment.ranks} replicas"}
        rows = [row | size | {"sent": sent[row["family"]]} for row in rows]
    return Results(experiment.reference, compared, rows)


def sent_bytes(point: Point) -> float:
    """Return the bytes that a replica sends in a mean step, by formula, as a ring sends them."""
    config = build_job_config([f"--job.config_file={point.config}", *point.arguments])
    run = read_run(config, point.ranks or 1)
    sent = 0.0
    for row in averaged(run, 0, step_traffic(run, 0)):
        if row.mesh_dim == "dp_replicate":
            share = WIRE_SHARE[row.op] * (run.replicas - 1) / run.replicas
            sent += share * row.elements * element_size(row, run.wire_dtypes)
    return sent


def section(name: str, minus: str | None = None) -> str:
    """Return what stands between the markers of an experiment: its tables and their origin."""
    if name in REPLICAS:
        return section_of_replicas(name, minus)
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


def section_of_replicas(name: str, minus: str | None) -> str:
    """Return one table of all numbers of replicas, and who needs the fewest bytes."""
    known = [results_of(part, minus, replicas=True) for part in REPLICAS[name] if stored_runs(part)]
    rows = [row for results in known for row in results.rows]
    if not rows:
        return "No search of a rate has ended yet."
    reference = known[0].compared
    parts = [f"At equal tokens; KB that a replica sends in a mean step:[^{name}]"]
    parts.append(table(rows, reference))
    for size in dict.fromkeys(row["size"] for row in rows):
        parts.append(fewest_bytes([row for row in rows if row["size"] == size], reference))
    seeds = sorted({seed for row in rows for seed in row["losses"]})
    return "\n\n".join([*parts, origin(name, seeds)])


def fewest_bytes(rows: Sequence[Row], reference: str) -> str:
    """Say in a sentence who reaches the reference's loss, or nearly, with the fewest bytes."""
    own = next((row for row in rows if row["family"] == reference), None)
    if own is None:
        return f"**{rows[0]['size']}**: {reference} has no runs yet."
    compared = [row for row in rows if row["minus_reference"] is not None]
    near = [row for row in compared if row["minus_reference"][0] <= NEAR]
    best = min([own, *near], key=lambda row: row["sent"])
    told = f"**{own['size']}**: {best['family']} reaches {reference}'s loss + {NEAR} with the "
    told += f"fewest bytes, {kilobytes(best)} KB per step"
    if best is own:
        return f"{told}; none that sends less does."
    gap, high = with_interval(best["minus_reference"], "+.3f"), best["minus_reference"][2]
    shown = "its whole interval" if high is not None and high <= NEAR else "its mean alone"
    return f"{told} for {kilobytes(own)}: {gap}, by {shown}."


def kilobytes(row: Row) -> str:
    """Return what a replica sends in a mean step."""
    return f"{row['sent'] / 1e3:,.1f}"


def table(rows: Sequence[Row], reference: str) -> str:
    """Return a Markdown table of losses of one budget: a row per family, columns per size."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    header = ["family"]
    for size in sizes:
        of_size = f"{size}: " if len(sizes) > 1 else ""
        header += [f"{of_size}loss (learning rate)", f"{of_size}minus {reference} [95%]"]
        header += [f"{of_size}KB"] if "sent" in rows[0] else []
    lines: dict[str, list[str]] = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        lines[family] = [family]
        for size in sizes:
            found = [row for row in rows if (row["family"], row["size"]) == (family, size)]
            lines[family] += cells(found[0]) if found else ["-"] * ((len(header) - 1) // len(sizes))
    return markdown_table(header, list(lines.values()))


def cells(row: Row) -> list[str]:
    """Return the mean loss ± the seeds' deviation with its rate, and the difference."""
    losses = list(row["losses"].values())
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    text = f"{row['loss'][0]:.3f}{spread} ({row['learning_rate']:g})"
    bytes_sent = [kilobytes(row)] if "sent" in row else []
    return [text, with_interval(row["minus_reference"], "+.3f"), *bytes_sent]


def origin(name: str, seeds: Sequence[int]) -> str:
    """Return the footnote: where the runs come from, and how to repeat them."""
    runs = [run for part in REPLICAS.get(name, [name]) for run in stored_runs(part).values()]
    where, numbers = versions_text(runs), ", ".join(map(str, seeds))
    command = f"scripts/research/results.sh {name}"
    return f"[^{name}]: {len(runs)} runs, seeds {numbers}; {where}; `{command}`."


def names() -> list[str]:
    """Return the experiments with stored runs."""
    return sorted(path.stem for path in finished_runs.FOLDER.glob("*.json"))


def placed(page: str) -> list[str]:
    """Return the experiments with stored runs whose tables have a place on the page."""
    return [name for name in names() if f"<!-- table: {name} -->" in page]


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
    shared = {part: name for name, parts in REPLICAS.items() for part in parts}
    for name in [shared.get(options.name, options.name)] if options.name else placed(page):
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        if name in placed(page):
            page = insert(PAGE, page, f"\n{section(name)}\n", begin, end)
        else:
            print(section(name))
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
