# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import os
import signal

import pytest

from torchtitan_lr.training.signals import StopSignal


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "SIGINT"),
        (signal.SIGUSR2, "a change of machines"),
    ],
)
def test_a_signal_is_remembered_and_the_next_one_acts(number: signal.Signals, name: str) -> None:
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {n: signal.getsignal(n) for n in stops}
    try:
        stop = StopSignal()
        stop.install()
        assert stop.name is None
        os.kill(os.getpid(), number)
        assert stop.name == name
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
