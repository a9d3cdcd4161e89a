# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whether replicas that came and went have trained as one process does, and tables of faults."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.faults.trials import Outcome
from tests.support.replay import merge_commits, replay
from torchtitan_lr.console.tables import markdown_table

TOLERANCE = 1e-4
"""Largest difference between a step's loss and that of one process, nats per token."""


@dataclass(frozen=True)
class Verdict:
    """What the logs of a run show.

    Attributes:
        steps: Committed steps.
        missing: Steps before the last one that no log has.
        unequal: Steps after which two replicas had different bits.
        twice: ``(part, index)`` of data that were used in two steps.
        largest: Largest difference of a loss from the replay in one process, nats per token.
        records: Records of replicas that were compared, all steps together.
    """

    steps: int
    missing: list[int]
    unequal: list[int]
    twice: list[tuple[int, int]]
    largest: float
    records: int

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        wrong = self.missing or self.unequal or self.twice
        return not wrong and self.largest <= TOLERANCE

    def __str__(self) -> str:
        """Return one line per condition."""
        return (
            f"{self.steps} committed steps, missing: {self.missing or 'none'}\n"
            f"steps after which replicas had unequal bits: {self.unequal or 'none'}"
            f" ({self.records} records compared)\n"
            f"data used twice: {self.twice or 'none'}\n"
            f"replay in one process: losses differ by at most {self.largest:.1e}"
        )


def judge(arguments: Sequence[str], run: Path, replayed: Path) -> Verdict:
    """Compare the logs of all replicas with one another and with one process.

    Args:
        arguments: The command line of a replica, without its id.
        run: The run's dump folder.
        replayed: A new dump folder for the replay.
    """
    commits = merge_commits(run)
    steps = [record["step"] for record in commits.steps]
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
    largest = float("nan")
    if not missing:
        losses = replay(arguments, commits.steps, replayed)
        pairs = zip(losses, commits.steps, strict=True)
        largest = max(abs(loss - record["loss"]) for loss, record in pairs)
    lines = [len(path.read_text().splitlines()) for path in run.glob("replica_*/commits.jsonl")]
    return Verdict(len(steps), missing, commits.unequal, commits.twice, largest, sum(lines))


def as_json(outcomes: Sequence[Outcome], verdict: Verdict) -> dict[str, Any]:
    """Return everything as JSON values."""
    return {"faults": [asdict(outcome) for outcome in outcomes], **asdict(verdict)}


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with one row for each fault and signal."""
    alike: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        alike.setdefault((outcome.fault, outcome.signal), []).append(outcome)
    header = ("fault", "signal", "times", "seconds lost", "attempts discarded", "at the return")
    rows = [
        [
            fault,
            name,
            str(len(same)),
            _range([outcome.lost for outcome in same]),
            str(sum(outcome.discarded for outcome in same)),
            _range([outcome.at_return for outcome in same]),
        ]
        for (fault, name), same in alike.items()
    ]
    return markdown_table(header, rows)


def _range(seconds: Sequence[float]) -> str:
    """Return the median and, of several, the largest."""
    if len(seconds) == 1:
        return f"{seconds[0]:.1f}"
    return f"{median(seconds):.1f}, at most {max(seconds):.1f}"
