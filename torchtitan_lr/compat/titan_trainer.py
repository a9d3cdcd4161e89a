# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Patches of torchtitan's trainer, checkpoint manager, metrics and devices.

torchtitan's Trainer creates its parts in its constructor, without arguments to replace them, and
resolves the device at import. Each function below replaces a name in a torchtitan module, never in
torch, and raises if the name is missing.

Tested with torchtitan 0.2.2 and torch 2.11 and 2.13. torchtitan's main branch has a different
Trainer.
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

A module missing from this list would try to use a GPU on a machine without one. A test searches for
such modules.
"""

UNKNOWN_PEAK = 312e12
"""The result of torchtitan's `get_peak_flops` for an unknown device (an A100's peak)."""

known_peak_flops: Callable[[str], float] = titan_utils.get_peak_flops
"""torchtitan's own function, saved before `bind_peak_flops` replaces it."""


def bind_peak_flops(peak_flops: Callable[[str], float]) -> None:
    """Make torchtitan call ``peak_flops`` for a device's FLOP/s.

    If upstream reads the peak elsewhere, the MFU of an unknown device is silently computed with an
    A100's peak. This function's test fails first.
    """
    setattr(titan_utils, "get_peak_flops", peak_flops)  # noqa: B010  (a module has no such type)


def bind_device_holders(device_type: str, device_module: Any) -> None:
    """Set another device in all torchtitan modules that store it.

    Args:
        device_type: E.g. ``cpu``.
        device_module: Implements the part of ``torch.cuda``'s interface that torchtitan calls.
    """
    for name in DEVICE_HOLDERS:
        module = importlib.import_module(name)
        for attribute, value in (("device_type", device_type), ("device_module", device_module)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)


def device_type() -> str:
    """Return torchtitan's device type, including a change by `bind_device_holders`."""
    return str(titan_utils.device_type)


@contextmanager
def trainer_parts(manager: type[CheckpointManager]) -> Iterator[None]:
    """Make torchtitan's Trainer use another checkpoint manager and no autocast.

    The FSDP2 wrapper applies mixed precision at every world size (see `apply_data_parallel`). Every
    rank receives the loss, so the check that a pipeline schedule shows the loss is disabled.
    Replaces ``CheckpointManager`` and ``ensure_pp_loss_visible`` in ``torchtitan.train``,
    ``maybe_enable_amp`` in ``torchtitan.distributed.utils``. If upstream renames one, this raises
    an AttributeError.
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
    """Prevent a MetricsProcessor from opening TensorBoard or wandb in its constructor.

    Upstream opens them there, before loading a checkpoint can raise. Replaces
    ``_build_metric_logger``; if upstream renames it, this raises an AttributeError.
    """
    return patch.object(titan_metrics, "_build_metric_logger", lambda *_: BaseLogger())


class OpenCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager with public names for its private methods.

    A subclass that saves at other times needs them. If upstream renames one, the first save fails
    with an AttributeError.
    """

    def checkpoint_folder(self, step: int) -> str:
        """Return the folder of a step's checkpoint (``_create_checkpoint_id``)."""
        return str(self._create_checkpoint_id(step))

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether `save` saves a step, which may be the last (``_should_save``)."""
        return bool(self._should_save(step, last))

    def wait_for_save(self) -> None:
        """Wait until an asynchronous save is on disk (``_async_wait``)."""
        self._async_wait()

    def flattened_states(self) -> dict[str, Any]:
        """Return all states, with the model's at the top level (``_flattened_model_states_sd``)."""
        states: dict[str, Any] = self._flattened_model_states_sd()
        return states

    def as_if_without_folder(self) -> AbstractContextManager[Any]:
        """Make ``load`` use ``initial_load_path``, which it does only if no folder exists."""
        return patch.object(self, "folder", "")
