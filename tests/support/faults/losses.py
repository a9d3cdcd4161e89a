# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run whose replicas are killed one after the other, and its validation loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from tests.support.faults.fleet import Fleet
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.training.history import HISTORY_FILE, VALIDATION_LOSS, read_history


@dataclass(frozen=True)
class Trained:
    """What a run came to.

    Attributes:
        loss: Validation loss after the last step, nats per token.
        members: Mean number of replicas in a step.
        tokens: Trained tokens.
        discarded: Attempts that were discarded.
        seconds: From the first committed step to the last.
    """

    loss: float
    members: float
    tokens: int
    discarded: int
    seconds: float


def train(fleet: Fleet, every: int) -> Trained:
    """Train a fleet to its end.

    Args:
        fleet: A fleet that was not started.
        every: Committed steps from one kill to the next, each of another replica, which is started
            again at once; 0 for no kill.

    Raises:
        RunFailedError: The fleet does not go on.
    """
    setting = fleet.setting
    steps, number = setting.config.training.steps, len(setting.places)
    history = setting.folder / HISTORY_FILE
    fleet.start_lighthouse()
    for replica in range(number):
        fleet.start(replica)
    fleet.wait_full()
    for turn, step in enumerate(range(every, steps, every) if every else ()):
        fleet.wait(lambda step=step: fleet.last()["step"] >= step, f"step {step}")  # type: ignore[misc]
        fleet.kill(turn % number)
        fleet.start(turn % number)

    def losses() -> list[float]:
        records = [record for record in read_history(history) if record["step"] == steps]
        return [record[VALIDATION_LOSS] for record in records if VALIDATION_LOSS in record]

    fleet.wait(lambda: bool(losses()), f"validation of step {steps}")
    commits = fleet.commits()
    return Trained(
        losses()[-1],
        mean(len(record["replicas"]) for record in commits),
        sum(record["tokens"] for record in commits),
        sum(record["discarded"] for record in commits),
        commits[-1]["time"] - commits[0]["time"],
    )


def as_table(results: Sequence[tuple[int, int, Trained]]) -> str:
    """Return a Markdown table of runs.

    Args:
        results: Seed, steps between kills (0 for none), and what the run came to.
    """
    header = ("killed", "seed", "loss", "replicas per step", "tokens", "discarded", "seconds")
    rows = [
        [
            f"every {every}" if every else "never",
            str(seed),
            f"{found.loss:.4f}",
            f"{found.members:.2f}",
            f"{found.tokens:,}",
            str(found.discarded),
            f"{found.seconds:.0f}",
        ]
        for seed, every, found in results
    ]
    for every in sorted({every for _, every, _ in results}):
        same = [found.loss for _, other, found in results if other == every]
        spread = f" ± {stdev(same):.4f}" if len(same) > 1 else ""
        name = f"every {every}" if every else "never"
        rows.append([name, "mean", f"{mean(same):.4f}{spread}", "", "", "", ""])
    return markdown_table(header, rows)
