# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The sums of a step, and the log of committed steps, ``commits.jsonl``."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lr.training.guard import StepData

COMMITS_FILE = "commits.jsonl"
"""In the private folder of each replica."""


class Sums:
    """Numbers of a step, of one rank or summed over all ranks of the members.

    Args:
        tokens: Valid tokens.
        read: Tokens read, valid or not.
        nominal_loss: Token losses over the nominal number of tokens; 0 if not finite.
        nonfinite: Ranks whose loss is not finite.
        stopping: Replicas whose first rank has a stop signal.
        *means: The mean loss of each replica; a rank adds its share of its replica's.
    """

    def __init__(
        self,
        tokens: float,
        read: float,
        nominal_loss: float,
        nonfinite: float,
        stopping: float,
        *means: float,
    ) -> None:
        self.tokens, self.read, self.nominal_loss = tokens, read, nominal_loss
        self.nonfinite, self.stopping, self.means = nonfinite, int(stopping), means

    @staticmethod
    def of(
        data: StepData,
        loss: float,
        stops: bool,
        nominal: float,
        section: Any,
        is_copy: bool = False,
    ) -> "Sums":
        """Return the numbers of one rank.

        Args:
            data: Its micro-batches.
            loss: Its token losses over the nominal number of tokens.
            stops: Whether it is a first rank with a stop signal.
            nominal: The nominal number of tokens.
            section: ``[fault_tolerance]``.
            is_copy: Whether another rank of the replica counts the same tokens (tensor
                parallelism).
        """
        finite = math.isfinite(loss)
        means = [0.0] * section.group_size
        if is_copy:
            return Sums(0.0, 0.0, 0.0, float(not finite), 0.0, *means)
        read = sum(labels.numel() for _, labels in data.microbatches)
        if finite and data.global_tokens:  # of this replica's ranks
            means[section.replica_id] = loss * nominal / data.global_tokens
        value = loss if finite else 0.0
        return Sums(data.tokens, read, value, float(not finite), float(stops), *means)

    def __iter__(self) -> Iterator[float]:
        head = (self.tokens, self.read, self.nominal_loss, self.nonfinite, float(self.stopping))
        return iter((*head, *self.means))

    def loss(self, nominal: float) -> float:
        """Return the mean over the tokens of all members, in nats; NaN if one is not finite."""
        if self.nonfinite or not self.tokens:
            return math.nan
        return self.nominal_loss * nominal / self.tokens

    def largest(self, replicas: Sequence[int]) -> float:
        """Return the largest mean loss of a member."""
        return math.nan if self.nonfinite else max(self.means[replica] for replica in replicas)


def add_commit(
    path: Path,
    step: int,
    replicas: Sequence[int],
    taken: Sequence[int],
    tokens: float,
    **figures: Any,
) -> None:
    """Append a committed step.

    Args:
        path: The log.
        step: The step.
        replicas: Those that took part.
        taken: Committed steps of each part of the data, this one included.
        tokens: Valid tokens of the step.
        **figures: Further values of the record.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "step": step,
        "time": time.time(),
        "replicas": list(replicas),
        "taken": list(taken),
        "tokens": int(tokens),
        **figures,
    }
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
