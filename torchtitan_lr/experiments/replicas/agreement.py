# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Members of a step make the same all-reduces: a call of another size is refused before it is made.

gloo ends the process that receives more than it expects, and no exception can be caught. So members
agree on the calls of a step before they make them. A step of a known kind has the calls that it had
last time: the step's first call carries a digest of their sizes, and each member compares its own
calls with them. In the first step of a kind, and while a member does not know it, members compare
the sizes before each call. A difference loses the step, as any other failure of a collective does,
and the kind is no longer known: the next attempt compares again.
"""

from collections.abc import Callable
from hashlib import sha256

ANY = "agreed"
"""The size of a call that the members have agreed on by the call before it."""


class MismatchError(RuntimeError):
    """This replica would make a collective that other members do not make."""


class CallAgreement:
    """The all-reduces of the steps of one `ReplicaGroup`.

    Attributes:
        known: Sizes of the calls of committed steps, in order, by kind of step.
    """

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self._kind: str | None = None
        self._calls: list[str] = []
        self._sums: Callable[[], list[float]] | None = None
        self._expected: list[str] | None = None

    def begin(self, kind: str) -> None:
        """Begin an attempt, whose first call is that of `claims`.

        Args:
            kind: What determines the calls of this step, equal on all members.
        """
        self._kind, self._calls = kind, []
        self._sums = self._expected = None

    def claims(self) -> list[float]:
        """Return the numbers of this member that are summed in the step's first call."""
        calls = self.known.get(self._kind or "")
        digest = float(_number(repr((self._kind, calls)), 2)) if calls else 0.0
        return [1.0, digest, digest**2]

    def decide_by(self, sums: Callable[[], list[float]]) -> None:
        """Set what returns the sums of the claims over the members, for the calls that follow."""
        self._sums = sums

    def check(self, size: str, same: Callable[[int], bool]) -> None:
        """Check a call before it is made; do nothing outside an attempt and for its first call.

        Args:
            size: Its type and number of elements, or `ANY`.
            same: Returns whether all members give the same number; a collective.

        Raises:
            MismatchError: Another member makes another call, or none.
        """
        if self._kind is None or self._sums is None:
            return
        place = len(self._calls)
        if not place:
            members, total, squares = self._sums()
            # All expect the same calls; else one does not know them.
            equal = total > 0 and members * squares == total**2
            self._expected = self.known[self._kind] if equal else None
        self._calls.append(size)
        if self._expected is None:
            if not same(_number(size, 6)):
                raise MismatchError(f"sum {place + 1} of this step has {size}, elsewhere another")
        elif self._expected[place : place + 1] != [size]:
            before = "".join(self._expected[place : place + 1]) or "no call"
            del self.known[self._kind]
            raise MismatchError(f"sum {place + 1} of this step has {size}, before {before}")

    def end(self, committed: bool) -> None:
        """End an attempt."""
        if committed and self._kind is not None:
            self.known[self._kind] = self._calls
        self._kind = None


def _number(text: str, size: int) -> int:
    """Return a positive number of ``size`` bytes; sums of squares of 2 bytes are exact in fp64."""
    return int.from_bytes(sha256(text.encode()).digest()[:size], "big") or 1
