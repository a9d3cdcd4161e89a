# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checkpoints' files, the interpreter's end, and torchrun."""

import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tests.unit.compat.doors import changed, parameters
from torchtitan_lr.compat import checkpointing, elastic, interpreter


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
    assert not unknown, changed(f"DCP writes {unknown}", "checkpointing.METADATA_CLASSES")
    for module, name in checkpointing.METADATA_CLASSES:
        if module.startswith("torch"):
            assert hasattr(importlib.import_module(module), name), changed(
                f"{module}.{name}", "checkpointing.METADATA_CLASSES"
            )


def test_interpreter_runs_what_is_registered():
    code = (
        "import atexit, os; from torchtitan_lr.compat.interpreter import run_exit_functions;"
        "atexit.register(print, 'end'); run_exit_functions(); os.write(1, b'after'); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "end\nafter", changed("atexit._run_exitfuncs", interpreter.__name__)


def test_elastic_how_torchrun_starts_and_ends_ranks():
    want = changed("SubprocessContext._close", "elastic.close_ranks")
    assert parameters(elastic.close_ranks) == ("death_sig", "timeout"), want
    api = inspect.getsource(inspect.getmodule(elastic.SubprocessContext))
    assert "self._close(death_sig=death_sig, timeout=timeout)" in api, want
    handler = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    want = changed("Popen in subprocess_handler", "elastic.ranks_started_with")
    assert "return Popen(" in inspect.getsource(handler.SubprocessHandler), want
    with elastic.ranks_started_with(print, len):
        assert (handler.Popen, elastic.SubprocessContext._close) == (print, len), want
    assert handler.Popen is subprocess.Popen
    assert elastic.SubprocessContext._close is elastic.close_ranks


def test_elastic_each_start_of_several_machines_has_a_store_of_its_own():
    parameters = RendezvousParameters("c10d", "localhost:0", "run", 1, 1, is_host="1")
    with elastic.ranks_started_with(print, len):
        handler = get_rendezvous_handler(parameters)
        stores = []
        for _ in range(2):
            where = handler.next_rendezvous().bootstrap_store_info
            # The port is bound by now: ranks are clients of torchrun's store.
            stores.append(dist.TCPStore(where.master_addr, where.master_port))
            stores[-1].set("key of this start", "1")
        assert handler.use_agent_store
    want = changed("DynamicRendezvousHandler", "elastic.ranks_started_with")
    assert stores[0].port != stores[1].port, want
    handler.shutdown()
