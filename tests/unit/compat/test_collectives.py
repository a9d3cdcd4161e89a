# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every gloo group has one worker thread, however it is created."""

import sys
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
