# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What all unit tests share."""

import hashlib
import sys

import pytest


@pytest.fixture(scope="module")
def small_library(tmp_path_factory):
    """Put a library of 60 short files, 15 of them held out, in place of the interpreter's."""
    root = tmp_path_factory.mktemp("library")
    wanted = {True: 15, False: 45}
    for i in range(5000):
        name = f"part{i % 7}/module_{i}.py"
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0
        if wanted[held_out]:
            wanted[held_out] -= 1
            (root / name).parent.mkdir(exist_ok=True)
            lines = (
                f"def f{n}(x):  # {n * i % 97}\n    return x + {n * n}\n" for n in range(i % 40)
            )
            (root / name).write_text(f'"""Module {i}."""\n' + "".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sysconfig.get_path", lambda name: str(root))
        yield root


@pytest.fixture
def variables(monkeypatch):
    """What sets variables, where none of a launcher's is set."""
    for name in ("NGPU", "NNODES", "LOG_RANK", "COMM_MODE", "RDZV_ENDPOINT", "CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MAX_RESTARTS", raising=False)
    return monkeypatch


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def code_cache(tmp_path_factory):
    """Where transformers copies the code of models to, else below the home folder."""
    import transformers.dynamic_module_utils as utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.syspath_prepend(utils.HF_MODULES_CACHE)
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)  # another file's copies
        yield
