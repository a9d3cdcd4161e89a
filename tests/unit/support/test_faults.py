# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Points at which replicas are struck, what a fault cost, and what the logs show; no torchft."""

import json

import pytest

from tests.support.faults.orders import (
    BEFORE,
    COMMITTED,
    DURING,
    PLAIN,
    REFRESH,
    VOTE,
    Strike,
    note,
    notes,
    order,
    ordered,
    sent_by,
)
from tests.support.faults.trials import Outcome, cost, strikes
from tests.support.faults.verdict import Verdict, summary
from tests.support.replay import merge_commits
from torchtitan_lr.replicas.commits import COMMITS_FILE


def test_every_point_of_both_steps_is_struck_once():
    found = strikes({PLAIN: 2, REFRESH: 3}, ["SIGKILL"])
    where = [(strike.kind, strike.point, strike.index) for strike in found]
    wanted = {(PLAIN, point, index) for point in (BEFORE, DURING) for index in range(2)}
    wanted |= {(REFRESH, point, index) for point in (BEFORE, DURING) for index in range(3)}
    wanted |= {(kind, point, 0) for kind in (PLAIN, REFRESH) for point in (VOTE, COMMITTED)}
    assert len(where) == len(set(where)) and set(where) == wanted


@pytest.mark.parametrize(("kind", "due"), [(PLAIN, [6, 7, 8, 10]), (REFRESH, [9])])
def test_a_step_of_the_kind_is_struck(kind, due):
    # The first step refreshes, and every eighth after it.
    strike = Strike("SIGKILL", BEFORE, kind, step=6)
    assert [step for step in range(1, 11) if strike.is_due(step, 8)] == due


def test_orders_and_notes_pass_through_files(tmp_path):
    strike = Strike("SIGSTOP", DURING, REFRESH, 4, 17)
    order(tmp_path, 2, strike)
    assert ordered(tmp_path, 2) == strike and ordered(tmp_path, 1) is None
    order(tmp_path, 2, None)
    assert ordered(tmp_path, 2) is None
    for step in (3, 4):
        note(tmp_path, 0, "struck", step=step)
    assert [found["step"] for found in notes(tmp_path, 0, "struck")] == [3, 4]
    assert notes(tmp_path, 1, "struck") == []


def test_the_bytes_sent_are_those_of_the_device():
    table = """Inter-|   Receive   |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs
    lo:  11 1 0 0 0 0 0 0 12 1 0 0 0 0 0 0
 slow0: 310 5 0 0 0 0 0 0 4096 7 0 0 0 0 0 0
"""
    assert sent_by("slow0", table) == 4096
    with pytest.raises(KeyError):
        sent_by("eth0", table)


def test_the_cost_of_a_fault_and_of_the_return():
    # A step per second; step 6 comes 3 s late, with a discarded attempt, step 9 comes 5 s late.
    times = [1, 2, 3, 4, 5, 9, 10, 11, 17, 18]
    commits = [{"time": float(time), "discarded": int(time == 9)} for time in times]
    lost, discarded, at_return = cost(commits, at=5.5, back=11.5, full=18.0)
    assert (lost, discarded, at_return) == (3.0, 1, 4.0)
    # Struck behind its vote: the others commit the same step at once, the next one waits.
    assert cost(commits, at=4.9, back=11.5, full=11.5) == (3.0, 1, 0.0)


def write(folder, replica, records):
    path = folder / f"replica_{replica}" / COMMITS_FILE
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def committed(step, taken, digest):
    values = {"replicas": [0, 1], "tokens": 64, "loss": 8.0, "time": float(step)}
    return {"step": step, "taken": taken, "digest": digest, **values}


@pytest.mark.parametrize("fault", ["", "bits", "data"])
def test_logs_that_differ_are_noticed(tmp_path, fault):
    write(tmp_path, 0, [committed(step, [step, step], f"d{step}") for step in (1, 2, 3)])
    second = 1 if fault == "data" else 2
    other = [committed(1, [1, 1], "d1"), committed(2, [2, 2], "dx" if fault == "bits" else "d2")]
    write(tmp_path, 1, other)
    if fault == "data":
        (tmp_path / "replica_0" / COMMITS_FILE).unlink()
        again = [committed(1, [1, 1], "d1"), committed(2, [2, second], "d2")]
        (tmp_path / "replica_1" / COMMITS_FILE).write_text("\n".join(map(json.dumps, again)))
    found = merge_commits(tmp_path)
    assert found.unequal == ([2] if fault == "bits" else [])
    assert found.twice == ([(1, 1)] if fault == "data" else [])


@pytest.mark.parametrize(
    ("missing", "unequal", "twice", "largest", "holds"),
    [
        ([], [], [], 9e-5, True),
        ([4], [], [], 0.0, False),
        ([], [4], [], 0.0, False),
        ([], [], [(0, 4)], 0.0, False),
        ([], [], [], 2e-4, False),
        ([], [], [], float("nan"), False),
    ],
)
def test_a_verdict_holds_if_nothing_is_wrong(missing, unequal, twice, largest, holds):
    assert Verdict(9, missing, unequal, twice, largest, 27).holds is holds


def test_tables_sum_up_alike_faults():
    outcomes = [
        Outcome("plain step, in collective", "SIGKILL", index, (index,), 9, lost, 1, 0.0)
        for index, lost in enumerate((1.0, 2.0, 6.0))
    ]
    row = "| plain step, in collective | SIGKILL | 3 | 2.0, at most 6.0 | 3 | 0.0, at most 0.0 |"
    assert summary(outcomes).splitlines()[2:] == [row]
