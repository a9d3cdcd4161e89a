# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Two network namespaces, and what a fault on one of them costs; with ``--full`` alone."""

import pytest

from tests.support import two_machines as trials
from tests.support.namespaces import NotPermittedError, two_machines


@pytest.mark.parametrize("fault", trials.FAULTS)
def test_a_fault_costs_at_most_the_steps_since_the_last_checkpoint(fault, request, tmp_path):
    if not request.config.getoption("--full"):
        pytest.skip("takes minutes: run with --full")
    try:
        with two_machines() as names:
            found = trials.disturb(fault, tmp_path, names)
    except NotPermittedError as error:
        pytest.skip(str(error))
    assert found.lost < 10  # the interval of its checkpoints
    if fault == "cut":  # a cut cable closes no connection: the time limit of 30 s notices it
        assert found.ranks is not None and found.ranks > 30
    if fault == "join":  # the ranks save before they make room for another machine
        assert found.lost == 0 and found.then == "both go on"


def test_other_losses_are_noticed(monkeypatch):
    """The control: a step that is computed again must have the same loss."""
    trial = object.__new__(trials.Trial)
    monkeypatch.setattr(trial, "losses", lambda: {1: 5.0, 2: 4.0001}, raising=False)
    trial._compare({1: 5.0, 2: 4.0})
    with pytest.raises(trials.BrokenError, match="step 2 had loss"):
        trial._compare({1: 5.0, 2: 4.1})
