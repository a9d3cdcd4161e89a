# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""When exchanges run: in which order on a CPU, and after what on an accelerator's streams."""

import pytest
import torch

from tests.support.units import backward
from torchtitan_lr.compression.codecs import complete
from torchtitan_lr.compression.exchange_overlap import ExchangeOverlap

CPU = torch.device("cpu")


class Work:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"wait {self.name}")


def exchange(log, name):
    log.append(f"start {name}")
    yield [Work(log, name)]
    log.append(f"end {name}")


def run(queue, log, name, may_wait=True, tensors=()):
    return lambda: queue.run(exchange(log, name), complete, tensors, may_wait)


def test_an_exchange_ends_when_the_next_starts_or_backward_ends():
    log, queue = [], ExchangeOverlap(CPU)
    backward(run(queue, log, "a"), run(queue, log, "b"), lambda: log.append("last node"))
    ended = ["start a", "wait a", "end a", "start b", "last node", "wait b", "end b"]
    assert log == ended
    backward(run(queue, log, "a"))  # and again in the next backward
    assert log == [*ended, "start a", "wait a", "end a"]


def test_what_is_read_at_once_ends_at_once():
    log, queue = [], ExchangeOverlap(CPU)
    backward(run(queue, log, "a", may_wait=False), lambda: log.append("last node"))
    assert log == ["start a", "wait a", "end a", "last node"]
    log.clear()
    backward(run(queue, log, "a", may_wait=False), run(queue, log, "b"), lambda: log.append("c"))
    assert log == ["start a", "wait a", "end a", "start b", "c", "wait b", "end b"]
    log.clear()
    run(queue, log, "a")()  # outside backward there is no later
    assert log == ["start a", "wait a", "end a"]


def fail():
    raise ValueError("a unit's backward")


def test_what_a_backward_that_raised_has_started_ends_with_the_next():
    log, queue = [], ExchangeOverlap(CPU)
    with pytest.raises(ValueError, match="a unit's backward"):
        backward(run(queue, log, "lost"), fail)
    log.clear()
    backward(run(queue, log, "a"))
    assert log == ["wait lost", "end lost", "start a", "wait a", "end a"]
