# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checkpoints' files, the interpreter's end, and the threads of gloo's groups."""

import importlib
import pickle
import sys

import torch
import torch.distributed.checkpoint as dcp

from torchtitan_lr.compat import checkpointing


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
