# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runs of an experiment's methods on slow links: bytes and seconds up to every step.

Runs with ``metrics.comm_ledger`` and ``metrics.log_freq = 1`` know the bytes of every step. A step
on a link of B Mbit/s takes its computation, as measured where it ran, and then the time of its
bytes: nothing overlaps. `SECONDS_FILE` may hold what steps take on a real link, where they may.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from torchtitan_lr.checkpoints.run_record import data_ranks
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.figures import SMOOTHED_POINTS
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.launch.run_state import FINISHED
from torchtitan_lr.scaling.experiments import step_records
from torchtitan_lr.scaling.sweep import Point
from torchtitan_lr.training.history import COMM_BYTES, STEP_SECONDS, train_loss

SECONDS_FILE = "seconds.json"
"""In the folder of an experiment: seconds per step by family, under ``compute`` and under the rate
of every link on which they were measured, such as ``200``. A link counts as measured for a model if
all of its methods with a finished run are in the file."""

STEP_ERROR, STEP_FREEDOM = 0.07, 22
"""Standard error of the log of a step's seconds, and its degrees of freedom.

The logs of the seconds of 23 methods, one call each, at 200 Mbit/s and without a limit, differ by
-0.01 in the mean, with a standard deviation of 0.096, which is √2 errors
(``scripts/research/experiments/seconds/race.json``)."""

_SAID = {"to do": "not run", "cut off": "cut off or running"}
"""What the status of a sweep's point means here, where it is not the status itself."""


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


@dataclass(frozen=True)
class Method:
    """The runs of a family at one size and budget.

    Args:
        courses: Its finished runs, by seed.
        others: What became of the other runs of the plan, one entry per seed.
        ended: Whether every run has finished or diverged, or cannot run.
    """

    courses: Mapping[int, Course]
    others: Sequence[str]
    ended: bool

    @property
    def seeds(self) -> int:
        """Number of its runs in the plan, one per seed."""
        return len(self.courses) + len(self.others)

    @property
    def competes(self) -> bool:
        """Whether all seeds have finished: a method may not race on its lucky ones."""
        return not self.others

    def state(self) -> str:
        """Return how many seeds have finished, and what became of the others."""
        counts = [f"{count} {status}" for status, count in Counter(self.others).items()]
        return ", ".join([f"{len(self.courses)}/{self.seeds}", *counts])


@dataclass(frozen=True)
class Link:
    """A link, and what is known of the steps on it.

    Args:
        mbit: Its rate, Mbit/s.
        compute: Seconds per step without a link, by family; empty for those where the runs ran.
        measured: Seconds per step on this link, by family; empty if they are modelled.
    """

    mbit: float
    compute: Mapping[str, float]
    measured: Mapping[str, float]

    def __str__(self) -> str:
        """Return its rate, and where its seconds come from."""
        return f"{self.mbit:g} Mbit/s ({'measured' if self.measured else 'modelled'})"

    def time(self, family: str, course: Course, steps: int) -> float:
        """Return the seconds of so many steps of a run."""
        if self.measured:
            return steps * self.measured[family]
        compute = self.compute.get(family, course.seconds)
        return steps * compute + course.sent[steps - 1] * 8e-6 / self.mbit

    def error(self, family: str, course: Course) -> float:
        """Return the standard error of the log of the time of a run's steps."""
        if self.measured:
            return STEP_ERROR
        steps = len(course.losses)
        compute = steps * self.compute.get(family, course.seconds)
        return STEP_ERROR * compute / self.time(family, course, steps)

    def times(self, family: str, course: Course) -> list[float]:
        """Return the seconds up to every step of a run."""
        return [self.time(family, course, step) for step in range(1, len(course.losses) + 1)]


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
        ConfigError: A step of the run is missing, or has not been counted.
    """
    arguments = [f"--job.config_file={point.config}", *point.arguments]
    config = build_job_config(arguments)
    replicas = config.parallelism.data_parallel_replicate_degree
    shards = data_ranks(config, point.ranks or 1) // replicas
    want = "2 or more in every family: one rank sends nothing, so no link is compared"
    require((point.ranks or 1) > 1, "ranks", point.ranks, want)
    losses, sent, total = [], [], 0.0
    want = "metrics.comm_ledger and metrics.log_freq = 1, so that every step is counted"
    records = step_records(folder)
    for step, record in enumerate(records, start=1):
        counted = {key: size for key, size in record.items() if key.startswith(COMM_BYTES)}
        loss = train_loss(record)
        timed = record.get(STEP_SECONDS) is not None
        if record["step"] != step or loss is None or not (counted and timed):
            raise ConfigError("overrides", f"{folder.name}, step {step}", want)
        for key, size in counted.items():
            total += size * wire_share(key.removeprefix(COMM_BYTES), replicas, shards)
        losses.append(loss)
        sent.append(total)
    if len(losses) < point.row.get("steps", 1):
        raise ConfigError("overrides", f"{folder.name}, step {len(losses) + 1}", want)
    window = max(1, len(losses) // SMOOTHED_POINTS)
    means = [fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]
    seconds = median(record[STEP_SECONDS] for record in records)
    return Course(means, sent, seconds, point.row["val_loss"])


def read_method(points: Sequence[Point], work: Path) -> Method:
    """Read the runs of a family at one size and budget; errors as for `read_course`."""
    courses, others = {}, []
    for point in points:
        status = str(point.row["status"])
        if status == FINISHED:
            courses[point.settings["seed"]] = read_course(point, work / point.name)
        else:
            others.append(_SAID.get(status, status))
    return Method(courses, others, all(point.is_done for point in points))


def links_of(rates: Sequence[float], known: Measured, families: Set[str]) -> list[Link]:
    """Return the links of these rates: the measured ones, each with its model beside it."""
    whole = {rate: seconds for rate, seconds in known.items() if families <= seconds.keys()}
    compute = whole.get("compute", {})
    links = []
    for mbit in rates:
        if f"{mbit:g}" in whole:
            links.append(Link(mbit, compute, whole[f"{mbit:g}"]))
        links.append(Link(mbit, compute, {}))
    return links
