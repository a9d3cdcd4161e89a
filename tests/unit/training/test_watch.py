# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run warns of, and what it does not; a slow rank is in tests/distributed."""

import math
import random

import pytest

from torchtitan_lr.training import history
from torchtitan_lr.training.watch import Watch

LOSS, SPEED = history.TRAIN_LOSS, history.TOKENS_PER_S


@pytest.fixture
def watch(one_rank):
    return Watch([], False, 1)


def told(watch, **series):
    """The logged steps, from 0, in which something is told, with its title."""
    columns = {LOSS: series.get("losses"), SPEED: series.get("speeds")}
    columns[history.SLOWEST_BEHIND] = series.get("behind")
    steps = max(len(values) for values in columns.values() if values is not None)
    usual = {LOSS: 3.0, SPEED: 1e4, history.SLOWEST_BEHIND: 2.0}
    found = []
    for step in range(steps):
        record = {k: usual[k] if values is None else values[step] for k, values in columns.items()}
        found += [(step, title, line) for title, line in watch.look(record)]
    return found


NOISE = [0.02 * math.sin(7.0 * step) for step in range(60)]
FALLING = [3.0 + 8.0 * math.exp(-step / 5) + noise for step, noise in enumerate(NOISE)]


def test_a_loss_that_jumps_is_told_once_and_again_after_it_was_right(watch):
    losses = [*FALLING[:30], 6.0, 6.1, 6.0, *FALLING[30:], 9.0]
    losses[25] = math.nan  # a skipped step
    found = told(watch, losses=losses)
    assert [(step, title) for step, title, _ in found] == [(30, "Loss spike"), (63, "Loss spike")]
    assert found[0][2].startswith("loss 6.000, before at most ")
    # The same early, where a window is not full, and smaller ones.
    assert told(Watch([], False, 1), losses=[11.0, 14.0, *FALLING]) == []
    # Nor the noise of small losses.
    rng = random.Random(0)
    small = [0.05 * rng.uniform(0.7, 1.3) for _ in range(2000)]
    assert told(Watch([], False, 1), losses=small) == []


def test_a_speed_that_falls_and_stays_low_is_told_once(watch):
    """Not a window that a save slows down, nor the first ones, with compilation."""
    speeds = [1e3, *[1e4 * (1 + noise) for noise in NOISE[:30]], 2e3, 2e3, 1e4, *[7e3] * 30]
    found = told(watch, speeds=speeds)
    assert [(step, title) for step, title, _ in found] == [(41, "Slow steps")]
    assert found[0][2].startswith("7,000 tokens/s, before 9,8")
    record = {LOSS: 3.0, SPEED: 1e3, history.MFU: 1.25}
    lines = [line for _ in range(19) for _, line in watch.look(record)]
    assert len(lines) == 1 and lines[0].startswith("1,000 tokens/s, MFU 1.25%, before 7,000")


def test_a_rank_that_stays_slow_is_told_once(watch):
    found = told(watch, behind=[25.0, 25.0, 25.0, 2.0, *[30.0] * 9])
    assert [(step, title) for step, title, _ in found] == [(11, "Slow rank")]
    assert found[0][2].endswith(" takes 30% longer")
