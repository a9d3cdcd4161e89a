# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Signals that stop a run after the step in which they arrive."""

import os
import signal
from dataclasses import dataclass
from types import FrameType

MACHINES_CHANGED = "a change of machines"
"""Name of SIGUSR2, with which the launcher ends the ranks to start them again."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class StopSignal:
    """Records a signal to stop, so that the trainer can finish and save its step."""

    name: str | None = None  # the received signal, or `MACHINES_CHANGED`; None until one arrives

    def install(self) -> None:
        """Handle the signals; a second one has its default action, below torchrun none.

        A scheduler signals all processes of a job: a rank gets its signal and the launcher's.
        """

        def receive(number: int, frame: FrameType | None) -> None:
            self.name = signal.Signals(number).name
            if number == signal.SIGUSR2:
                self.name = MACHINES_CHANGED
            later = signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL
            for other in _STOP_SIGNALS:
                signal.signal(other, later)

        for number in _STOP_SIGNALS:
            signal.signal(number, receive)
