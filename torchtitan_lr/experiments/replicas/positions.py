# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where in its part of the data each replica is: replica i reads the i-th of ``group_size`` parts.

Every member knows how many steps of each part were committed. A row is a pure function of its
number, so a newcomer goes on where its part stopped, and nothing is read twice.
"""

import json
from collections.abc import Sequence


class DataPositions:
    """Committed steps of each part of the data.

    Args:
        parts: Number of parts.
        split: What gives a part its rows: rows per step of all parts, and of one.

    Attributes:
        taken: Committed steps of each part.
        split: As given.
    """

    def __init__(self, parts: int, split: tuple[int, int] = (1, 1)) -> None:
        self.taken, self.split = [0] * parts, split

    def commit(self, replicas: Sequence[int]) -> None:
        """Count a committed step of the replicas that took part."""
        for replica in replicas:
            self.taken[replica] += 1

    def row_of(self, part: int) -> int:
        """Return where a part goes on: rows of all parts before its first step not committed."""
        return self.taken[part] * self.split[0]

    def as_json(self) -> str:
        """Return everything as one line of JSON."""
        return json.dumps({"taken": self.taken, "split": self.split})

    def load_json(self, text: str) -> None:
        """Replace the committed steps by what `as_json` returned.

        Raises:
            ValueError: It has another number of parts.
        """
        taken = json.loads(text)["taken"]
        if len(taken) != len(self.taken):
            raise ValueError(f"{len(taken)} parts, not {len(self.taken)}")
        self.taken = [int(count) for count in taken]
