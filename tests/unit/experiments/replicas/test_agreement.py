# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Members agree on the sizes of a step's sums before they make them."""

import pytest

from torchtitan_lr.experiments.replicas.agreement import ANY, CallAgreement, MismatchError

pytestmark = pytest.mark.nightly

STEP = ["4 float32", "9 float32", ANY]


class Member:
    """Its agreement, and what it compared with the others; they answer what `same` says."""

    def __init__(self, same=True):
        self.calls, self.compared, self.same = CallAgreement(), [], same

    def compare(self, number):
        self.compared.append(number)
        return self.same

    def step(self, kind, sizes, claims=None, committed=True):
        """An attempt, in which all members have this one's claims or the sums ``claims``."""
        self.compared = []
        self.calls.begin(kind)
        self.calls.check("numbers", self.compare)  # the first call
        own = self.calls.claims()
        self.calls.decide_by(lambda: claims or [3 * number for number in own])
        for size in sizes:
            self.calls.check(size, self.compare)
        self.calls.end(committed)
        return own


def test_sizes_are_compared_until_the_kind_of_step_is_known():
    member = Member()
    assert member.step("plain", STEP)[1] == 0
    assert len(member.compared) == 3 and len(set(member.compared)) == 3
    assert member.step("plain", STEP)[1] > 0 and not member.compared
    member.step("refresh", [*STEP, "1 float32"])
    assert len(member.compared) == 4
    assert list(member.calls.known) == ["plain", "refresh"]


def test_another_size_is_refused():
    member = Member(same=False)
    with pytest.raises(MismatchError, match="sum 1 of this step has 4 float32, elsewhere another"):
        member.step("plain", STEP)


@pytest.mark.parametrize("sizes", [["4 float32", "8 float32"], [*STEP, "1 float32"]])
def test_a_call_unlike_the_known_step_is_refused(sizes):
    """Once: the next attempt compares, so that a step whose calls have changed is made."""
    member = Member()
    member.step("plain", STEP)
    with pytest.raises(MismatchError, match=f"{sizes[-1]}, before (9 float32|no call)"):
        member.step("plain", sizes)
    assert not member.compared
    member.calls.end(committed=False)
    member.step("plain", sizes)
    assert len(member.compared) == len(sizes)
    member.step("plain", sizes)
    assert not member.compared


def test_one_member_that_does_not_know_the_step_makes_all_compare():
    member = Member()
    member.step("plain", STEP)
    _, claim, square = member.calls.claims()
    for others in ([2.0, claim, square], [2.0, 2 * claim + 1, square + (claim + 1) ** 2]):
        member.step("plain", STEP, others)
        assert len(member.compared) == 3
