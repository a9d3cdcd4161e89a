# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's trainer, and the parts that its constructor creates without arguments.

Each function below replaces a name in a torchtitan module, never in torch, and raises if the name
is missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torchtitan.train as titan_train
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.distributed import utils as dist_utils
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
