# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The time of a call; a device with a queue of its own stands for a GPU."""

from types import SimpleNamespace

import pytest

from scripts.bench import stopwatch


class Device:
    """Works for `work` ms on each call, and begins when it has ended what was queued before."""

    def __init__(self, work):
        self.work, self.host, self.busy_until, self.waits = work, 0.0, 0.0, 0

    def call(self):
        self.host += 1.0  # the launch
        self.busy_until = max(self.busy_until, self.host) + self.work

    def synchronize(self):
        self.waits += 1
        self.host = max(self.host, self.busy_until) + 0.5

    def event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", max(self.busy_until, self.host))
        event.elapsed_time = lambda later: later.at - event.at
        return event


@pytest.mark.parametrize(("work", "expected"), [(5.0, 5.0), (0.25, 1.0)], ids=["device", "host"])
def test_a_gpu_is_timed_without_waiting_for_it(monkeypatch, work, expected):
    device = Device(work)
    cuda = SimpleNamespace(Event=device.event, synchronize=device.synchronize)
    monkeypatch.setattr(stopwatch.torch, "cuda", cuda)
    together = []
    found = stopwatch.median_ms(device.call, "cuda", 20, 3, lambda: together.append(device.waits))
    assert found == pytest.approx(expected)  # the slower of both
    assert device.waits == 2 and together == [1]


def test_a_cpu_is_timed_call_by_call(monkeypatch):
    clock, done = [0.0], []
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])

    def call():
        done.append(None)
        clock[0] += 0.002 * len(done)

    # Two calls warm up; the third, fourth and fifth take 6, 8 and 10 ms.
    assert stopwatch.median_ms(call, "cpu", 3, 2) == pytest.approx(8.0)
    assert len(done) == 5
