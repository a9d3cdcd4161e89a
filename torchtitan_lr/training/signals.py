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
    """Records a signal to stop, so that the trainer can finish and save its step.

    Attributes:
        name: The received signal, or `MACHINES_CHANGED`; None until one arrives.
    """

    name: str | None = None

    def install(self) -> None:
        """Handle the signals; a second signal has its default action.

        Below torchrun a second signal is ignored: torchrun or the launcher kills. A scheduler such
        as Slurm signals all processes of a job, so a rank receives its signal and the launcher's.
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
