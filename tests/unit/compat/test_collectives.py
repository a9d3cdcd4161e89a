# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every gloo group has one worker thread, however it is created."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_lr.compat import process_groups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")


def workers(*groups):
    """The worker threads of this process, once each group has completed a collective."""
    for group in groups:  # a thread has its name when it works
        group.allreduce([torch.ones(1)]).wait()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo_runloop") for name in names)


def with_options(store):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=70)
    return dist.ProcessGroupGloo(store, 0, 1, options)


CONSTRUCTED = {
    "by name, as torch": lambda store: dist.ProcessGroupGloo(
        store, 0, 1, timeout=timedelta(seconds=70)
    ),
    "with options": with_options,
}


@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo"])
@pytest.mark.parametrize("construct", CONSTRUCTED.values(), ids=CONSTRUCTED)
def test_a_constructed_group_has_one_worker_and_its_timeout(construct, interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    earlier = workers()
    group = construct(dist.HashStore())
    assert workers(group) == earlier + 1
    assert group.options._timeout == timedelta(seconds=70)


def test_the_groups_of_a_process_have_one_worker_each():
    earlier = workers()
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        second = process_groups.second_group(world)
        x = torch.arange(3.0)
        gather = process_groups.functional.all_gather_into_tensor
        started = [gather(x + i, 1, world.group_name) for i in range(9)]
        for i, out in enumerate(started):
            assert process_groups.functional.wait_tensor(out).equal(x + i)
        assert workers(world, second) == earlier + 2
    finally:
        dist.destroy_process_group()
