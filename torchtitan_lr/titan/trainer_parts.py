# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's trainer, and replacements, in its modules, of what its constructor creates."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torchtitan.train as titan_train
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer as Trainer


@contextmanager
def trainer_parts(manager: type[CheckpointManager]) -> Iterator[None]:
    """Make torchtitan's Trainer use another checkpoint manager and no autocast."""
    # The FSDP2 wrapper applies mixed precision at every world size (see `apply_data_parallel`).
    # Every rank receives the loss, so the check that a pipeline schedule shows the loss is
    # disabled. Replaces ``CheckpointManager`` and ``ensure_pp_loss_visible`` in
    # ``torchtitan.train``, ``maybe_enable_amp`` in ``torchtitan.distributed.utils``. If upstream
    # renames one, this raises an AttributeError.
    with (
        patch.object(titan_train, "CheckpointManager", manager),
        patch.object(titan_train, "ensure_pp_loss_visible", lambda *_: None),
        patch.object(dist_utils, "maybe_enable_amp", lambda *_: nullcontext()),
    ):
        yield


@contextmanager
def profilers(job_config: Any, step: int) -> Iterator[list[Any]]:
    """Run the profilers of ``[profiling]`` from a step on; call ``step()`` of each per step."""
    where = {"global_step": step, "base_folder": job_config.job.dump_folder}
    with (
        maybe_enable_profiling(job_config.profiling, **where) as times,
        maybe_enable_memory_snapshot(job_config.profiling, **where) as memory,
    ):
        yield [profiler for profiler in (times, memory) if profiler is not None]
