# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/two_machines.py``: two network namespaces, and what a fault on one of them costs.

The faults run with ``--full`` alone: each is a run of two starts.
"""

import sys

import pytest

from tests.integration import runs
from tests.scripts import load_script


def test_each_fault_costs_what_is_said(request):
    if not request.config.getoption("--full"):
        pytest.skip("takes minutes: run with --full")
    done = runs.run(
        [sys.executable, "scripts/check/two_machines.py", "--faults", "machine", "cut", "join"]
    )
    assert done.status == 0, done.everything
    if done.out.startswith("skipped: "):
        pytest.skip(done.out.strip())
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["machine", "cut", "join"]
    for _, lost, ranks, step, then in rows[:2]:
        assert int(lost) < 10  # the interval of its checkpoints
        assert float(ranks) <= float(step)
        assert then == "the first goes on alone"
    # The ranks save before they make room for another machine.
    assert rows[2][1] == "0" and rows[2][-1] == "both go on"
    # A cut cable closes no connection: it is noticed by the time limit of 30 seconds.
    assert float(rows[1][2]) > 30


def test_it_skips_with_a_reason(capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert load_script("check/two_machines").main([]) == 0
    assert capsys.readouterr().out == "skipped: ip (iproute2) is not installed\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--mbit", "0"], "--mbit: got 0"), (["--steps", "0"], "--steps"), (["--faults", "x"], "x")],
)
def test_refused(arguments, told, capsys):
    with pytest.raises(SystemExit) as info:
        load_script("check/two_machines").main(arguments)
    assert info.value.code == 2
    assert told in capsys.readouterr().err


def test_other_losses_are_noticed(monkeypatch):
    """The control: a step that is computed again must have the same loss."""
    script = load_script("check/two_machines")
    trial = object.__new__(script.Trial)
    monkeypatch.setattr(trial, "losses", lambda: {1: 5.0, 2: 4.0001}, raising=False)
    trial._compare({1: 5.0, 2: 4.0})
    with pytest.raises(script.BrokenError, match="step 2 had loss"):
        trial._compare({1: 5.0, 2: 4.1})
