# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checkpoints' files, the interpreter's end, and torchrun."""

import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

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


def test_elastic_overrides_what_torchruns_agent_has():
    own = [name for name, found in vars(elastic.Agent).items() if inspect.isfunction(found)]
    overridden = {name for name in own if hasattr(LocalElasticAgent, name)} - {"__init__"}
    expected = {"_monitor_workers", "_rendezvous", "_start_workers", "_stop_workers"}
    assert overridden == expected, changed("LocalElasticAgent", "elastic.Agent")
    for name in expected:
        ours, theirs = (
            parameters(getattr(kind, name)) for kind in (elastic.Agent, LocalElasticAgent)
        )
        assert ours == theirs, changed(f"LocalElasticAgent.{name}", f"elastic.Agent.{name}")
