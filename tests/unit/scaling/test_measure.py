# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Reading communication off a profile; the trainer that makes it runs in tests/integration."""

from types import SimpleNamespace

import pytest
from torch.profiler import DeviceType

from torchtitan_lr.scaling.measure import communication_seconds, union_length


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(0, 3)], 3),
        ([(5, 6), (0, 3)], 4),
        ([(0, 3), (2, 5)], 5),
        ([(0, 9), (2, 5), (8, 10)], 10),
    ],
)
def test_union(spans, length):
    assert union_length(spans) == length


def event(name, start, end, device=DeviceType.CPU):
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end)
    )


def test_collectives_are_told_from_the_rest():
    events = [
        event("gloo:all_reduce", 0, 1e6),
        event("gloo:all_gather", 5e5, 2e6),
        event("aten::mm", 0, 9e6),
        event("c10d::allreduce_", 3e6, 9e6),  # the call, not the transfer
        event("ncclDevKernel_AllReduce", 4e6, 5e6, DeviceType.CUDA),
        event("ampere_gemm", 5e6, 9e6, DeviceType.CUDA),
    ]
    assert communication_seconds(events) == {"communication": 3.0, "collectives": 3.5}
