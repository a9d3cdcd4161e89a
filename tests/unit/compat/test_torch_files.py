# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checkpoints' files, the interpreter's end, and the threads of gloo's groups."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchtitan_lr.compat import checkpointing, process_groups


def test_checkpointing_knows_every_class_that_dcp_writes(tmp_path):
    state = {"w": torch.ones(2), "b": {"n": 1, "l": [torch.zeros(1)]}, "d": torch.ones(1).half()}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    named = set()

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    with open(tmp_path / ".metadata", "rb") as file:
        Names(file).load()
    dtypes = {pair for pair in named if isinstance(getattr(torch, pair[1], None), torch.dtype)}
    assert ("torch.distributed.checkpoint.metadata", "Metadata") in named
    of_enums = {("builtins", "getattr")} if sys.version_info < (3, 11, 4) else set()
    unknown = named - checkpointing.METADATA_CLASSES - dtypes - of_enums
    assert not unknown
    for module, name in checkpointing.METADATA_CLASSES:
        if module.startswith("torch"):
            assert hasattr(importlib.import_module(module), name)


def test_interpreter_runs_what_is_registered():
    code = (
        "import atexit, os; from torchtitan_lr.compat.interpreter import run_exit_functions;"
        "atexit.register(print, 'end'); run_exit_functions(); os.write(1, b'after'); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "end\nafter"


def workers(*groups):
    """The worker threads of this process, once each group has completed a collective."""
    for group in groups:  # a thread has its name when it works
        group.allreduce([torch.ones(1)]).wait()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo_runloop") for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
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
