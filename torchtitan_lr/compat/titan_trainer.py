# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's trainer, checkpoint manager, metrics and devices: what has no hook is replaced here.

torchtitan's Trainer builds its parts in one constructor without arguments for them, and resolves
the device at import. Each function below replaces a name in a module of torchtitan, never in torch,
and refuses to do so where the name is missing.

Seen in torchtitan 0.2.2 with torch 2.11 and 2.13. torchtitan's main branch has another Trainer.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_utils
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import BaseLogger

DEVICE_HOLDERS = (
    "torchtitan.tools.utils",
    "torchtitan.tools.profiling",
    "torchtitan.components.metrics",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.distributed.utils",
)
"""The modules of torchtitan 0.2.2 that bind ``device_type`` or ``device_module`` at import.

A module that is missing here would use a GPU where there is none. The door's test looks for it.
"""

UNKNOWN_PEAK = 312e12
"""What torchtitan's `get_peak_flops` answers for a device it does not know (an A100's peak)."""

known_peak_flops: Callable[[str], float] = titan_utils.get_peak_flops
"""torchtitan's own answer, taken before `bind_peak_flops` replaces it."""


def bind_peak_flops(peak_flops: Callable[[str], float]) -> None:
    """Let torchtitan ask ``peak_flops`` for a device's FLOP/s, in its utilities.

    If upstream asks elsewhere, MFU of an unknown device is that of an A100: a plausible lie. The
    door's test fails first.
    """
    setattr(titan_utils, "get_peak_flops", peak_flops)  # noqa: B010  (a module has no such type)


def bind_device_holders(device_type: str, device_module: Any) -> None:
    """Give the modules that hold torchtitan's device another one.

    Args:
        device_type: E.g. ``cpu``.
        device_module: With the part of ``torch.cuda``'s interface that torchtitan calls.
    """
    for name in DEVICE_HOLDERS:
        module = importlib.import_module(name)
        for attribute, value in (("device_type", device_type), ("device_module", device_module)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)


def device_type() -> str:
    """Return the device type that torchtitan uses, after `bind_device_holders` if that ran."""
    return str(titan_utils.device_type)


@contextmanager
def trainer_parts(manager: type[CheckpointManager]) -> Iterator[None]:
    """Let torchtitan's Trainer build another checkpoint manager, and no autocast.

    Mixed precision is the wrapper's at every world size (see `apply_data_parallel`), and every rank
    gets the loss, so that no pipeline schedule hides it. Replaces ``CheckpointManager`` and
    ``ensure_pp_loss_visible`` in ``torchtitan.train``, ``maybe_enable_amp`` in
    ``torchtitan.distributed.utils``. If upstream renames one, this raises an AttributeError.

    Args:
        manager: What is built instead of torchtitan's own.
    """
    import torchtitan.train as titan_train
    from torchtitan.distributed import utils as dist_utils

    with (
        patch.object(titan_train, "CheckpointManager", manager),
        patch.object(titan_train, "ensure_pp_loss_visible", lambda *_: None),
        patch.object(dist_utils, "maybe_enable_amp", lambda *_: nullcontext()),
    ):
        yield


def without_loggers() -> AbstractContextManager[Any]:
    """Let a MetricsProcessor open no TensorBoard or wandb in its constructor.

    Upstream opens them there, before a checkpoint may refuse the run. Replaces
    ``_build_metric_logger``; if upstream renames it, this raises an AttributeError.
    """
    return patch.object(titan_metrics, "_build_metric_logger", lambda *_: BaseLogger())


def build_loggers(job_config: Any, parallel_dims: Any, tag: str | None) -> BaseLogger:
    """Open TensorBoard and wandb on rank 0, as ``[metrics]`` asks.

    Upstream chooses a rank of the last pipeline stage, where alone it knows the loss; here every
    rank does. Replaces ``_get_metrics_rank`` and calls ``_build_metric_logger``; if upstream
    renames one, this raises an AttributeError.
    """
    with patch.object(titan_metrics, "_get_metrics_rank", lambda *_: 0):
        return titan_metrics._build_metric_logger(job_config, parallel_dims, tag)


class OpenCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager, whose private steps have public names.

    A subclass that saves at another moment needs them. If upstream renames one, the first save
    fails with an AttributeError.
    """

    def checkpoint_folder(self, step: int) -> str:
        """Return the folder of a step's checkpoint: ``_create_checkpoint_id``."""
        return str(self._create_checkpoint_id(step))

    def wait_for_save(self) -> None:
        """Wait until a save in the background is on disk: ``_async_wait``."""
        self._async_wait()

    def flattened_states(self) -> dict[str, Any]:
        """Return all states, the model's at the top level: ``_flattened_model_states_sd``."""
        states: dict[str, Any] = self._flattened_model_states_sd()
        return states

    def as_if_without_folder(self) -> AbstractContextManager[Any]:
        """Make ``load`` look at ``initial_load_path``, which it does only without a folder."""
        return patch.object(self, "folder", "")
