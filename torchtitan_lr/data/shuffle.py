# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A buffer that mixes the windows of a stripe, resumed without being stored.

Shuffled blocks alone leave a row in one long document for many steps, and several rows in similar
ones now and then: a wave in the loss curve. Therefore a stripe cuts its tokens into groups of ``G``
windows and permutes each group. Its position is where the present group begins, and how many of its
windows were taken. On resume the group is read again and those windows are dropped.

The next group is tokenised little by little, while the windows of the present one are taken, so
that no step waits for a whole group but the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.order import Order, permutation
from torchtitan_lr.data.stripes import DocumentStream, Stripe

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import BaseTokenizer


class ShuffledStripe(Stripe):
    """One stream of windows, permuted group by group.

    Args:
        stream: The stripe's documents.
        tokenizer: Encodes the documents.
        seq_len: Tokens of an input; a window has one more.
        order: The seed, and the tokens of a group.
        stripe: Index of the stripe: each has permutations of its own.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: BaseTokenizer,
        seq_len: int,
        order: Order,
        stripe: int,
    ) -> None:
        super().__init__(stream, tokenizer, seq_len)
        self._order = order
        self._stripe = stripe
        self._size = order.windows(seq_len)
        self._begin(super().state(), 0, 0)

    def _begin(self, start: dict[str, Any], group: int, taken: int) -> None:
        self._start, self._index, self._taken = start, group, taken
        self._group: npt.NDArray[np.int32] | None = None

    def missing(self, windows: int) -> int:
        """Return how many tokens must still be read for some windows, and for the next group."""
        total = self._taken + windows
        if self._group is None:
            total = -(-total // self._size) * self._size
        return super().missing(total)

    def take(self, windows: int) -> npt.NDArray[np.int64] | None:
        """Return the next windows in the shuffled order; as :meth:`Stripe.take`."""
        found: list[npt.NDArray[np.int32]] = []
        while windows:
            group = self._read_group() if self._group is None else self._group
            part = group[self._taken : self._taken + windows]
            if not len(part):
                return None
            self._group = group
            self._taken += len(part)
            windows -= len(part)
            found.append(part)
            if self._taken == len(group):
                self._begin(super().state(), self._index + 1, 0)
        return np.concatenate(found).astype(np.int64)

    def _read_group(self) -> npt.NDArray[np.int32]:
        """Return the present group, ``(G, seq_len + 1)``, with fewer windows at the end."""
        rows: list[npt.NDArray[np.int64]] = []
        while len(rows) < self._size and (row := super().take(1)) is not None:
            rows.append(row)
        if not rows:
            return np.empty((0, 0), dtype=np.int32)
        places = permutation(len(rows), self._order.seed, self._stripe, self._index)
        return np.concatenate(rows).astype(np.int32)[places]

    def state(self) -> dict[str, Any]:
        """Return where the group begins, and the windows that were taken from it (JSON)."""
        place = {"group": self._index, "taken": self._taken, "window": self._window}
        return self._start | {"order": self._order.state()} | place

    def load_state(self, state: dict[str, Any], changed: bool = False) -> None:
        """Go to a position that :meth:`state` returned; as :meth:`Stripe.load_state`.

        With another ``seq_len`` the group has other windows: then the position is approximate.
        """
        start = {name: state[name] for name in ("document", "offset")}
        super().load_state(start, changed)
        taken = int(state["taken"]) * int(state["window"]) // self._window
        self._begin(start, int(state["group"]), min(taken, self._size - 1))
