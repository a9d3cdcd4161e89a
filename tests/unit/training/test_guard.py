# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
import os
import signal

import pytest
import torch

from torchtitan_lr.training.guard import StopSignal, Verdict, agree


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_the_next_one_acts(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = StopSignal()
        stop.install()
        assert stop.name is None
        os.kill(os.getpid(), number)
        assert stop.name == number.name
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@pytest.mark.parametrize(
    ("loss", "stop", "verdict"),
    [
        (1.5, False, Verdict(None, False)),
        (1.5, True, Verdict(None, True)),
        (math.nan, False, Verdict(0, False)),
        (math.inf, True, Verdict(0, True)),
    ],
)
def test_one_process_agrees_with_itself(loss: float, stop: bool, verdict: Verdict) -> None:
    assert agree(loss, stop, torch.device("cpu")) == verdict
