# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Methods of one experiment as a race: loss over the bytes sent, and over seconds on slow links.

Methods of one model and size compete, those whose seeds have all finished. Their reference is the
first of them in the experiment's file. A seed of a method races to the loss with which the same
seed of the reference ends, plus the experiment's ``margin``. The fastest method wins a link if
every other one's time, paired by seed, differs from its own: t tests of the log of the ratio, at 5%
after Holm's correction for their number. The error of a step's seconds, which all seeds share,
counts in these tests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy import stats

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.console.figures import WIDTH, finish, new_figure
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.fit import student
from torchtitan_lr.scaling.links import (
    SECONDS_FILE,
    STEP_ERROR,
    STEP_FREEDOM,
    Course,
    Link,
    Method,
    links_of,
    read_method,
    read_seconds,
)
from torchtitan_lr.scaling.pictures import colors_of
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.report import with_interval
from torchtitan_lr.scaling.sweep import Point

LEVEL = 0.05
"""Level of the tests of a link, all together."""


@dataclass(frozen=True)
class Race:
    """Methods of one model, size and budget.

    Args:
        name: Its name, a part of file names.
        methods: By family, in the order of the file; the first one is the reference.
        links: In the order of their columns; a link that was measured is there twice.
        margin: Nats per token above the reference's last loss, at which a method has arrived.
    """

    name: str
    methods: Mapping[str, Method]
    links: Sequence[Link]
    margin: float

    @property
    def reference(self) -> tuple[str, Method]:
        """The first method, with its name."""
        return next(iter(self.methods.items()))

    def table(self) -> str:
        """Return the table, and what it shows, as Markdown."""
        reference, first = self.reference
        header = ["method", "seeds", "validation loss [95%]", "MB sent per rank"]
        cells = {}
        for family, method in self.methods.items():
            loss, sent = "-", "-"
            if courses := method.courses.values():
                loss = with_interval(student([course.validation for course in courses]), ".4f")
                sent = f"{fmean(course.sent[-1] for course in courses) / 1e6:,.1f}"
            cells[family] = [family, method.state(), loss, sent]
        if not first.competes:
            says = f"No times, no winner: seeds of {reference}, the reference: {first.state()}."
            return f"{markdown_table(header, list(cells.values()))}\n\n{says}"
        verdicts = []
        for link in self.links:
            header.append(f"{link}: s to {reference} + {self.margin:g} [95%]")
            column, says = self.judge(link)
            verdicts.append(f"- {link}: {says}")
            for family, line in cells.items():
                line.append(column.get(family, "-"))
        return "\n\n".join([markdown_table(header, list(cells.values())), "\n".join(verdicts)])

    def judge(self, link: Link) -> tuple[dict[str, str], str]:
        """Return the cells of the competing methods in a link's column, and its verdict."""
        cells, times = {}, {}
        for family, method in self.methods.items():
            if not method.competes:
                continue
            own = self.times(family, link)
            if len(own) == method.seeds:
                times[family] = own
            else:
                cells[family] = f"reached by {len(own)}/{method.seeds}"
        best = min(times, key=lambda family: fmean(times[family].values()))
        errors = {}
        for family in times:
            courses = self.methods[family].courses.values()
            errors[family] = fmean(link.error(family, course) for course in courses)
        p_values = beaten(times, best, errors)
        for family, own in times.items():
            cells[family] = with_interval(student(list(own.values())), ",.1f")
            if (p := p_values.get(family)) is not None:
                cells[family] += f", p = {p:.2g}"
        awaited = [family for family, method in self.methods.items() if not method.ended]
        return cells, verdict(p_values, best, awaited)

    def times(self, family: str, link: Link) -> dict[int, float]:
        """Return the seconds of a competing method on a link, by the seeds that arrive."""
        _, reference = self.reference
        times = {}
        for seed, course in self.methods[family].courses.items():
            steps = course.steps_to(reference.courses[seed].losses[-1] + self.margin)
            if steps is not None:
                times[seed] = link.time(family, course, steps)
        return times

    def draw(self, stem: Path) -> None:
        """Draw the losses over the bytes sent and over seconds, every seed a line.

        Args:
            stem: The beginning of the PNGs' paths.
        """
        measured = {link.mbit for link in self.links if link.measured}
        by_seconds: dict[str, Over] = {}
        for link in self.links:
            if link.measured or link.mbit not in measured:
                by_seconds[f"seconds, {link}"] = link.times
        by_bytes: dict[str, Over] = {"MB sent per rank": megabytes}
        self._draw(by_bytes, stem.with_name(f"{stem.name}_bytes_{self.name}.png"))
        self._draw(by_seconds, stem.with_name(f"{stem.name}_seconds_{self.name}.png"))

    def _draw(self, panels: Mapping[str, "Over"], path: Path) -> None:
        """Draw panels, given by the label of their axis."""
        figure = new_figure(max(WIDTH, 3.6 * len(panels)))
        ran = [family for family, method in self.methods.items() if method.courses]
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (label, over) in zip(row, panels.items(), strict=True):
            for family, color in colors_of(ran).items():
                name: str | None = family
                for course in self.methods[family].courses.values():
                    axes.plot(over(family, course), course.losses, color=color, label=name)
                    name = None  # one entry of the legend per method
            axes.set(xscale="log", xlabel=label)
            axes.grid(alpha=0.3)
        row[0].set_ylabel("training loss (nats per token)")
        finish(figure, path, self.name)


Over = Callable[[str, Course], Sequence[float]]
"""Where the steps of a family's run are on the axis of a panel."""


def megabytes(family: str, course: Course) -> list[float]:
    """Return the megabytes that a rank has sent up to every step."""
    return [size / 1e6 for size in course.sent]


def read_races(plan: Plan, points: Sequence[Point], rates: Sequence[float]) -> list[Race]:
    """Read the runs of an experiment as races, one per model, size, budget and measure.

    Args:
        plan: The plan.
        points: Returned by `Plan.main_points`, with the rows of a sweep.
        rates: Those of the links, Mbit/s.

    Raises:
        ConfigError: A finished run did not count its bytes, or `SECONDS_FILE` is wrong.
    """
    known = read_seconds(plan.work / SECONDS_FILE)
    found: dict[str, dict[str, list[Point]]] = {}
    for point in points:
        given = point.settings
        model = plan.experiment.families[given["family"]].model
        name = f"{model}_{given['size']}_{given['tokens_per_parameter']:g}"
        if len(plan.measures) > 1:
            name += f"_{given['equal']}"
        found.setdefault(name, {}).setdefault(given["family"], []).append(point)
    races = []
    for name, families in found.items():
        methods = {family: read_method(own, plan.work) for family, own in families.items()}
        ran = {family for family, method in methods.items() if method.courses}
        races.append(Race(name, methods, links_of(rates, known, ran), plan.experiment.margin))
    return races


def beaten(
    times: Mapping[str, Mapping[int, float]], best: str, errors: Mapping[str, float]
) -> dict[str, float | None]:
    """Return how probable each other family's distance from the best one is by chance.

    Args:
        times: Seconds by family and seed.
        best: The fastest family.
        errors: Standard error of the log of a family's seconds, which its seeds share.

    Returns:
        p of the log of the ratio, paired by seed, by Welch's t test of the sum of two variances:
        that of the mean over the seeds, and that of the shared errors. Corrected by Holm; None with
        fewer than two seeds in common.
    """
    p_values: dict[str, float | None] = {}
    for family, own in times.items():
        if family == best:
            continue
        common = sorted(own.keys() & times[best].keys())
        logs = [math.log(own[seed] / times[best][seed]) for seed in common]
        p_values[family] = None
        if len(logs) > 1:
            scatter = float(np.var(logs, ddof=1)) / len(logs)
            shared = errors[family] ** 2 + errors[best] ** 2
            variance = scatter + shared
            parts = scatter**2 / (len(logs) - 1) + shared**2 / STEP_FREEDOM
            t = abs(fmean(logs)) / math.sqrt(variance)
            p_values[family] = 2 * float(stats.t.sf(t, variance**2 / parts))
    return holm(p_values)


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Correct p values for their number by Holm's step-down procedure; None stays and counts."""
    ordered = sorted((p, name) for name, p in p_values.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for place, (p, name) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(p_values) - place) * p))
        corrected[name] = largest
    return corrected


def verdict(p_values: Mapping[str, float | None], best: str, awaited: Sequence[str] = ()) -> str:
    """Name the winner, or the methods from which the fastest one is not shown to differ.

    Args:
        p_values: Returned by `beaten`.
        best: The fastest method.
        awaited: Methods with runs that have not ended, which may still be faster.
    """
    rest = f"{', '.join(awaited)} {'has' if len(awaited) == 1 else 'have'} not ended"
    if not p_values:
        alone = f"{best} alone reaches the loss with all seeds"
        return f"no verdict: {rest}" if awaited else alone
    near = [name for name, p in p_values.items() if p is None or p > LEVEL]
    says = f"{best} wins"
    if near:
        says = f"no difference shown between {best} and {', '.join(near)}"
    return f"{says} so far: {rest}" if awaited else says


def rules(plan: Plan, races: Sequence[Race]) -> str:
    """Return what the times and the verdicts of an experiment mean."""
    experiment = plan.experiment
    judged = [race for race in races if race.reference[1].competes]
    least = float(stats.t.isf(LEVEL / 2, STEP_FREEDOM)) * STEP_ERROR * math.sqrt(2)
    parts = [
        "Times are those to a training loss, the mean over the last 1/20 of the steps: where the"
        " replicas differ between two syncs, it is no single model's. A seed's goal is the loss"
        f" with which the same seed of the first method ends, plus {experiment.margin:g}. A method"
        " competes once all of its seeds have ended. A modelled step takes its computation and then"
        " the time of its bytes; in a measured one both may overlap.",
        f"Tests: Welch's t of the log of the ratio to the fastest, paired by seed, {LEVEL:.0%}"
        f" after Holm for each link and model; the verdicts,"
        f" {sum(len(race.links) for race in judged)} in all, are not corrected for each other. A"
        f" step's seconds are known to {STEP_ERROR:.0%}, from one call: on a measured link no lead"
        f" under {math.expm1(least):.0%} is shown.",
    ]
    if any(len(family.learning_rates) > 1 for family in experiment.families.values()):
        chosen = {str(experiment.sizes[size].seeds[0]) for size in experiment.search}
        parts.append(f"Seed {', '.join(sorted(chosen))} chose the learning rates, and counts too.")
    return " ".join(parts)


def write_report(
    plan: Plan, points: Sequence[Point], rates: Sequence[float], edges: Sequence[str]
) -> str:
    """Write links.md, and the pictures links_bytes_NAME.png and links_seconds_NAME.png.

    Args:
        plan: The plan.
        points: As for `read_races`.
        rates: Those of the links, Mbit/s.
        edges: Lines on searches without a result.

    Returns:
        The text of links.md.

    Raises:
        ConfigError: No run has finished, or one did not count its bytes.
    """
    races = read_races(plan, points, rates)
    if not any(method.courses for race in races for method in race.methods.values()):
        raise ConfigError("--out", str(plan.work), "a folder with finished runs of the experiment")
    parts = [f"# {plan.experiment.name}", plan.experiment.description, rules(plan, races)]
    for race in races:
        parts += [f"## {race.name}", race.table()]
        race.draw(plan.work / "links")
    text = "\n\n".join(part for part in [*parts, *edges] if part)
    write_whole(plan.work / "links.md", text + "\n")
    return text
