# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time that a long run loses to failures, by the interval between its checkpoints.

Failures are independent of one another and of time: exponential, with mean time ``M`` between them.
After each, the run starts again (``R`` seconds) from its last complete checkpoint. A checkpoint
stops the training for ``d`` seconds.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006),
equations 20 and 37. All times are in seconds.
"""

import math


def mean_time_to_failure(devices: int, per_devices: int, seconds: float) -> float:
    """Return the mean time between failures of a whole machine, in seconds.

    Args:
        devices: Its devices; the failure of any of them stops the run.
        per_devices: In this many devices there is one failure per ``seconds``.
        seconds: See ``per_devices``.
    """
    return seconds * per_devices / devices


def young_interval(pause: float, mean: float) -> float:
    """Return Young's optimal training time between checkpoints, ``√(2 d M)``.

    Args:
        pause: ``d``.
        mean: ``M``.
    """
    return math.sqrt(2 * pause * mean)


def daly_interval(pause: float, mean: float) -> float:
    """Return Daly's optimal training time between checkpoints (equation 37).

    Args:
        pause: ``d``.
        mean: ``M``.
    """
    if pause >= 2 * mean:
        return mean
    x = pause / (2 * mean)
    return young_interval(pause, mean) * (1 + math.sqrt(x) / 3 + x / 9) - pause


def run_time_factor(interval: float, pause: float, restart: float, mean: float) -> float:
    """Return the expected time of a run over its time without checkpoints and failures.

    Daly's equation 20, ``M e^(R/M) (e^((τ+d)/M) - 1) / τ``; failures may also happen during a
    checkpoint and a restart.

    Args:
        interval: ``τ``, the training time between checkpoints.
        pause: ``d``.
        restart: ``R``.
        mean: ``M``.
    """
    return mean * math.exp(restart / mean) * math.expm1((interval + pause) / mean) / interval


def lost_share(interval: float, pause: float, restart: float, mean: float) -> float:
    """Return the share of a run's time that checkpoints and failures take, from 0 to 1.

    Args:
        interval: ``τ``, the training time between checkpoints.
        pause: ``d``.
        restart: ``R``.
        mean: ``M``.
    """
    return 1 - 1 / run_time_factor(interval, pause, restart, mean)
