# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where in its part of the data each replica is: replica i reads the i-th of ``group_size`` parts.

Every member knows how many steps of each part were committed, so a newcomer goes on where its part
stopped, and nothing is read twice. Positions in the text are longer; the members exchange them now
and then. A newcomer moves to the last one that they know and skips the steps since then.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EXCHANGE_STEPS = 20
"""Steps between exchanges of the positions in the text, besides those for a checkpoint."""


class DataPositions:
    """Committed steps and last known position of each part of the data.

    Attributes:
        taken: Committed steps of each part.
        known: By part: the number of committed steps at which its position in the text was
            exchanged, and that position (the state of its loader).
    """

    def __init__(self, parts: int) -> None:
        self.taken = [0] * parts
        self.known: dict[int, tuple[int, dict[str, Any]]] = {}

    def commit(self, replicas: Sequence[int], exchanged: Mapping[int, dict[str, Any]]) -> None:
        """Count a committed step.

        Args:
            replicas: The replicas that took part.
            exchanged: The loaders' states behind this step, if they were exchanged in it.
        """
        for replica in replicas:
            self.taken[replica] += 1
            if replica in exchanged:
                self.known[replica] = self.taken[replica], exchanged[replica]

    def start_of(self, part: int) -> tuple[int, dict[str, Any] | None]:
        """Return where a part can be read from: steps, and the loader's state (None: its start)."""
        return self.known.get(part, (0, None))

    def as_json(self) -> str:
        """Return everything as one line of JSON."""
        known = {str(part): list(found) for part, found in sorted(self.known.items())}
        return json.dumps({"taken": self.taken, "known": known})

    def load_json(self, text: str) -> None:
        """Replace everything by what `as_json` returned.

        Raises:
            ValueError: It has another number of parts.
        """
        found = json.loads(text)
        if len(found["taken"]) != len(self.taken):
            raise ValueError(f"{len(found['taken'])} parts, not {len(self.taken)}")
        self.taken = [int(count) for count in found["taken"]]
        self.known = {int(part): (int(at), state) for part, (at, state) in found["known"].items()}


class PartReader:
    """Reads a replica's part, each step again until it is committed.

    Args:
        read: Reads the next step's micro-batches.
        move: Moves the loader to a state that it returned, None for the start of the part.

    Attributes:
        steps: Committed steps of this part that were read; a pending one is not counted.
    """

    def __init__(
        self, read: Callable[[], Any], move: Callable[[dict[str, Any] | None], None]
    ) -> None:
        self._read, self._move = read, move
        self._pending: Any = None
        self.steps = 0

    def next(self, positions: DataPositions, part: int) -> Any:
        """Return the micro-batches of the first step of a part that is not committed."""
        wanted = positions.taken[part]
        if self._pending is not None and wanted == self.steps + 1:
            self.committed()  # the others committed a step whose end this replica missed
        if wanted != self.steps:
            at, state = positions.start_of(part)
            self._pending = None
            self._move(state)
            for _ in range(wanted - at):
                self._read()
            self.steps = wanted
        if self._pending is None:
            self._pending = self._read()
        return self._pending

    def committed(self) -> None:
        """Drop the micro-batches of a step that was committed."""
        self._pending = None
        self.steps += 1
