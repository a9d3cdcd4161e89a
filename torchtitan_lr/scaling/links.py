# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Methods of one experiment as a race: loss over the bytes sent, and over seconds on slow links.

Runs with ``metrics.comm_ledger`` and ``metrics.log_freq = 1`` know the bytes of every step. A step
on a link of B Mbit/s takes its computation, as measured where it ran, and then the time of its
bytes: nothing overlaps. `SECONDS_FILE` may hold what steps take on a real link instead.

Methods of one model and size compete for the loss with which the first of them that has finished,
their reference, ends. The fastest wins a link if every other method's time, paired by seed, differs
from its own: t tests of the log of the ratio, at 5% after Holm's correction for their number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy import stats

from torchtitan_lr.checkpoints.run_record import data_ranks
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.figures import SMOOTHED_POINTS, WIDTH, finish, new_figure
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.scaling.experiments import SECONDS, step_records
from torchtitan_lr.scaling.fit import student
from torchtitan_lr.scaling.pictures import colors_of
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.report import with_interval
from torchtitan_lr.scaling.sweep import FINISHED, Point
from torchtitan_lr.training.history import train_loss

RESOLUTION = 0.01
"""The least spread of the log of a time: steps of all seeds have one length, known to a percent."""

SECONDS_FILE = "seconds.json"
"""In the folder of an experiment: seconds per step by family, under ``compute`` and under the rate
of every link on which they were measured, such as ``200``. What one family of a race lacks does not
count for the others."""

LEVEL = 0.05
"""Level of the tests of a link, all together."""

_SENT = "comm_bytes/"


@dataclass(frozen=True)
class Course:
    """How a run went.

    Args:
        losses: Training loss up to every step, the mean of the last 1/20 of all steps; nats per
            token.
        sent: Bytes that a rank has sent up to every step.
        seconds: Seconds per step where it ran; the median.
        validation: Its validation loss at the end.
    """

    losses: Sequence[float]
    sent: Sequence[float]
    seconds: float
    validation: float

    def steps_to(self, target: float) -> int | None:
        """Return the number of steps to a loss; None if the run does not reach it."""
        reached = (k for k, loss in enumerate(self.losses, start=1) if loss <= target)
        return next(reached, None)

    def time(self, steps: int, mbit: float, measured: Mapping[str, float]) -> float:
        """Return the seconds of so many steps on a link.

        Args:
            steps: Their number.
            mbit: The link's rate, Mbit/s.
            measured: Seconds per step by rate, and under ``compute`` without a link.
        """
        if f"{mbit:g}" in measured:
            return steps * measured[f"{mbit:g}"]
        return steps * measured.get("compute", self.seconds) + self.sent[steps - 1] * 8e-6 / mbit


Courses = dict[str, dict[int, Course]]
"""Of the methods of one model and size: by family and seed."""


Measured = Mapping[str, Mapping[str, float]]
"""What `SECONDS_FILE` holds."""


def read_seconds(path: Path) -> Measured:
    """Read `SECONDS_FILE`; nothing if there is none.

    Raises:
        ConfigError: It does not hold positive seconds, by rate and family.
    """
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
        seconds = [value for families in found.values() for value in families.values()]
        fits = all(0 < value < math.inf for value in seconds)
    except (ValueError, AttributeError, TypeError):
        fits = False
    want = 'seconds per step such as {"compute": {"FAMILY": 0.2}, "200": {"FAMILY": 0.5}}'
    require(fits, "--out", str(path), want)
    return found


def wire_share(dim: str, replicas: int, shards: int) -> float:
    """Return the bytes that a rank sends per byte of the ledger, in a ring.

    Replicas sum gradients: a reduce-scatter and an all-gather. FSDP's calls are one of these each.

    Args:
        dim: Mesh dimension.
        replicas: Replication degree.
        shards: FSDP's ranks.

    Raises:
        ConfigError: Another dimension than these two has sent something.
    """
    if dim not in ("dp_replicate", "fsdp"):
        raise ConfigError("EXPERIMENT", dim, "runs of replicas and FSDP alone: dp_replicate, fsdp")
    if dim == "dp_replicate":
        return 2 * (replicas - 1) / replicas
    return (shards - 1) / shards


def read_course(point: Point, folder: Path) -> Course:
    """Read a finished run.

    Raises:
        ConfigError: Not every step of the run has been counted.
    """
    arguments = [f"--job.config_file={point.config}", *point.arguments]
    config = build_job_config(arguments)
    replicas = config.parallelism.data_parallel_replicate_degree
    shards = data_ranks(config, point.ranks or 1) // replicas
    losses, sent, total = [], [], 0.0
    records = step_records(folder)
    for step, record in enumerate(records, start=1):
        counted = {key: size for key, size in record.items() if key.startswith(_SENT)}
        loss = train_loss(record)
        if record["step"] != step or loss is None or not counted:
            want = "metrics.comm_ledger and metrics.log_freq = 1, so that every step is counted"
            raise ConfigError("overrides", f"{folder.name}, step {step}", want)
        for key, size in counted.items():
            total += size * wire_share(key.removeprefix(_SENT), replicas, shards)
        losses.append(loss)
        sent.append(total)
    window = max(1, len(losses) // SMOOTHED_POINTS)
    means = [fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]
    seconds = median(record[SECONDS] for record in records)
    return Course(means, sent, seconds, point.row["val_loss"])


def read_courses(plan: Plan, points: Sequence[Point]) -> dict[str, Courses]:
    """Read the finished runs of an experiment, by a name of the model, size, budget and measure.

    Args:
        plan: The plan.
        points: Returned by `Plan.main_points`, with the rows of a sweep.
    """
    found: dict[str, Courses] = {}
    for point in points:
        if point.row["status"] != FINISHED:
            continue
        given = point.settings
        model = plan.experiment.families[given["family"]].model
        race = f"{model}_{given['size']}_{given['tokens_per_parameter']:g}"
        if len(plan.measures) > 1:
            race += f"_{given['equal']}"
        courses = found.setdefault(race, {}).setdefault(given["family"], {})
        courses[given["seed"]] = read_course(point, plan.work / point.name)
    return found


def times_to(
    courses: Courses, target: float, mbit: float, measured: Measured
) -> dict[str, dict[int, float]]:
    """Return the seconds to a loss on a link by family and seed, if all its seeds reach it."""
    times: dict[str, dict[int, float]] = {}
    for family, seeds in courses.items():
        steps = {seed: course.steps_to(target) for seed, course in seeds.items()}
        times[family] = {
            seed: seeds[seed].time(count, mbit, _of_family(measured, family))
            for seed, count in steps.items()
            if count is not None
        }
    return {family: own for family, own in times.items() if len(own) == len(courses[family])}


def _of_family(measured: Measured, family: str) -> dict[str, float]:
    return {rate: seconds[family] for rate, seconds in measured.items()}


def beaten(times: Mapping[str, Mapping[int, float]], best: str) -> dict[str, float | None]:
    """Return how probable each other family's distance from the best one is by chance.

    Returns:
        p of Student's paired test of the log of the ratio, corrected by Holm, with a spread of
        `RESOLUTION` at least; None with fewer than two seeds in common.
    """
    p_values: dict[str, float | None] = {}
    for family, own in times.items():
        if family == best:
            continue
        common = sorted(own.keys() & times[best].keys())
        logs = [math.log(own[seed] / times[best][seed]) for seed in common]
        p_values[family] = None
        if len(logs) > 1:
            spread = max(float(np.std(logs, ddof=1)), RESOLUTION)
            t = abs(float(np.mean(logs))) / spread * math.sqrt(len(logs))
            p_values[family] = 2 * float(stats.t.sf(t, len(logs) - 1))
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


def verdict(p_values: Mapping[str, float | None], best: str) -> str:
    """Name the winner, or the methods from which the fastest one is not shown to differ."""
    if not p_values:
        return f"{best} alone reaches the loss"
    near = [name for name, p in p_values.items() if p is None or p > LEVEL]
    if not near:
        return f"{best} wins"
    return f"no difference shown between {best} and {', '.join(near)}"


def link_table(courses: Courses, links: Sequence[float], measured: Measured) -> str:
    """Return the table of one model and size, and the verdict on every link, as Markdown."""
    reference = next(iter(courses))
    target = max(course.losses[-1] for course in courses[reference].values())
    cells = {}
    for family, seeds in courses.items():
        final = student([course.validation for course in seeds.values()])
        sent = fmean(course.sent[-1] for course in seeds.values()) / 1e6
        cells[family] = [family, str(len(seeds)), with_interval(final, ".4f"), f"{sent:,.1f}"]
    verdicts = []
    for mbit in links:
        times = times_to(courses, target, mbit, measured)
        best = min(times, key=lambda family: fmean(times[family].values()))
        p_values = beaten(times, best)
        verdicts.append(f"- {_link_name(mbit, measured)}: {verdict(p_values, best)}")
        for family, line in cells.items():
            if family not in times:
                line.append("not reached")
                continue
            text = with_interval(student(list(times[family].values())), ",.1f")
            p = p_values.get(family)
            line.append(text if p is None else f"{text}, p = {p:.2g}")
    header = ["method", "seeds", "validation loss [95%]", "MB sent per rank"]
    to = f"s to {target:.4f} of {reference}"
    header += [f"{to}, {_link_name(mbit, measured)} [95%]" for mbit in links]
    return "\n\n".join([markdown_table(header, list(cells.values())), "\n".join(verdicts)])


def _link_name(mbit: float, measured: Mapping[str, Any]) -> str:
    how = "measured" if f"{mbit:g}" in measured else "modelled"
    return f"{mbit:g} Mbit/s ({how})"


Over = Callable[[str, Course], Sequence[float]]
"""Where the steps of a family's run are on the axis of a panel."""


def draw(courses: Courses, panels: Mapping[str, Over], path: Path, title: str) -> None:
    """Draw the losses of all methods; every seed is a line.

    Args:
        courses: The runs.
        panels: The panels, by the label of their axis.
        path: The PNG to write.
        title: The title.
    """
    figure = new_figure(max(WIDTH, 3.6 * len(panels)))
    colors = colors_of(list(courses))
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, over) in zip(row, panels.items(), strict=True):
        for family, seeds in courses.items():
            for seed, course in seeds.items():
                name = family if seed == next(iter(seeds)) else None
                axes.plot(over(family, course), course.losses, color=colors[family], label=name)
        axes.set(xscale="log", xlabel=label)
        axes.grid(alpha=0.3)
    row[0].set_ylabel("training loss (nats per token)")
    finish(figure, path, title)


def over_bytes(family: str, course: Course) -> list[float]:
    """Return the megabytes that a rank has sent up to every step."""
    return [size / 1e6 for size in course.sent]


def over_seconds(mbit: float, measured: Measured) -> Over:
    """Return what gives the seconds up to every step on a link."""

    def over(family: str, course: Course) -> list[float]:
        own = _of_family(measured, family)
        return [course.time(step, mbit, own) for step in range(1, len(course.losses) + 1)]

    return over


def write_report(plan: Plan, points: Sequence[Point], links: Sequence[float]) -> str:
    """Write links.md, and the pictures links_bytes_NAME.png and links_seconds_NAME.png.

    Args:
        plan: The plan.
        points: As for `read_courses`.
        links: Rates, Mbit/s.

    Returns:
        The text of links.md.

    Raises:
        ConfigError: No run has finished, or one did not count its bytes.
    """
    found = read_courses(plan, points)
    if not found:
        raise ConfigError("--out", str(plan.work), "a folder with finished runs of the experiment")
    known = read_seconds(plan.work / SECONDS_FILE)
    parts = [f"# {plan.experiment.name}", plan.experiment.description]
    for name, courses in found.items():
        # Methods are compared by measured seconds if all of them have some.
        whole = {rate for rate, seconds in known.items() if courses.keys() <= seconds.keys()}
        measured = {rate: known[rate] for rate in whole}
        parts += [f"## {name}", link_table(courses, links, measured)]
        by_bytes: dict[str, Over] = {"MB sent per rank": over_bytes}
        draw(courses, by_bytes, plan.work / f"links_bytes_{name}.png", name)
        by_seconds = {}
        for mbit in links:
            axis = f"seconds, {_link_name(mbit, measured)}"
            by_seconds[axis] = over_seconds(mbit, measured)
        draw(courses, by_seconds, plan.work / f"links_seconds_{name}.png", name)
    text = "\n\n".join(part for part in parts if part)
    (plan.work / "links.md").write_text(text + "\n")
    return text
