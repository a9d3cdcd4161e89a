# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""When exchanges run: in which order on a CPU, and after what on an accelerator's streams."""

from contextlib import contextmanager

import pytest
import torch

from torchtitan_lr.compression import beside as module
from torchtitan_lr.compression.beside import Beside, finish

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


class Unit(torch.autograd.Function):
    """Starts an exchange in backward, as a unit's communicator does."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


def backward(*calls):
    x = torch.ones(1, requires_grad=True)
    y = x
    for call in reversed(calls):
        y = Unit.apply(y, call)
    y.sum().backward()


def run(queue, log, name, may_wait=True, tensors=()):
    return lambda: queue.run(exchange(log, name), finish, tensors, may_wait)


def test_an_exchange_ends_when_the_next_starts_or_backward_ends():
    log, queue = [], Beside(CPU)
    backward(run(queue, log, "a"), run(queue, log, "b"), lambda: log.append("last node"))
    ended = ["start a", "wait a", "end a", "start b", "last node", "wait b", "end b"]
    assert log == ended
    backward(run(queue, log, "a"))  # and again in the next backward
    assert log == [*ended, "start a", "wait a", "end a"]


def test_what_is_read_at_once_ends_at_once():
    log, queue = [], Beside(CPU)
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
    log, queue = [], Beside(CPU)
    with pytest.raises(ValueError, match="a unit's backward"):
        backward(run(queue, log, "lost"), fail)
    log.clear()
    backward(run(queue, log, "a"))
    assert log == ["wait lost", "end lost", "start a", "wait a", "end a"]


class Streams:
    """Streams as lists of what they have done; a wait takes over what the other has done."""

    class Stream:
        def __init__(self):
            self.done = []

        def wait_stream(self, other):
            self.wait_event(list(other.done))

        def wait_event(self, done):
            self.done += [step for step in done if step not in self.done]

        def record_event(self):
            return list(self.done)

    def __init__(self):
        self.current = self.Stream()

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        outer, self.current = self.current, stream
        yield
        self.current = outer


class Buffer:
    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture
def streams(monkeypatch):
    found = Streams()
    monkeypatch.setattr(module.torch, "get_device_module", lambda device: found)
    return found


def queued(streams, queue, name, may_wait=True, buffers=()):
    """An exchange of a unit: the caller's stream has made the gradients of that unit."""

    def steps():
        streams.current.done.append(f"exchange {name}")
        yield []

    def call():
        streams.current.done.append(f"gradients {name}")
        queue.run(steps(), finish, buffers, may_wait)

    return call


def test_a_stream_of_its_own_runs_after_the_gradients_and_before_the_end(streams):
    caller, queue, buffer = streams.current, Beside(torch.device("cuda")), Buffer()
    seen = []
    units = [queued(streams, queue, name, buffers=[buffer]) for name in "abc"]
    backward(*units, lambda: seen.extend(caller.done))
    side = buffer.streams[0]
    assert side is not caller and buffer.streams == [side] * 3
    for name in "abc":  # each after its gradients
        assert side.done.index(f"gradients {name}") < side.done.index(f"exchange {name}")
    # Backward goes on without the last exchange, and with at most two in memory.
    assert "exchange c" not in seen and {"exchange a", "exchange b"} <= set(seen)
    assert {"exchange a", "exchange b", "exchange c"} <= set(caller.done)


def test_the_callers_stream_waits_for_what_is_read_at_once(streams):
    queue, seen = Beside(torch.device("cuda")), []
    unit = queued(streams, queue, "a", may_wait=False)
    backward(unit, lambda: seen.extend(streams.current.done))
    assert "exchange a" in seen
