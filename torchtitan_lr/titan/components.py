# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's trainer and its parts: checkpoints, loader, metrics, optimizers, schedules."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.profiler
import torchtitan.components.metrics as titan_metrics
import torchtitan.train as titan_train
from torchtitan.components.checkpoint import MODEL as MODEL
from torchtitan.components.checkpoint import AsyncMode as AsyncMode
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpoint import ModelWrapper as ModelWrapper
from torchtitan.components.dataloader import BaseDataLoader as BaseDataLoader
from torchtitan.components.lr_scheduler import LRSchedulersContainer as LRSchedulersContainer
from torchtitan.components.lr_scheduler import build_lr_schedulers as build_lr_schedulers
from torchtitan.components.metrics import BaseLogger as BaseLogger
from torchtitan.components.metrics import MetricsProcessor as MetricsProcessor
from torchtitan.components.metrics import TensorBoardLogger as TensorBoardLogger
from torchtitan.components.metrics import WandBLogger as WandBLogger
from torchtitan.components.optimizer import OptimizersContainer as OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer as Trainer


def without_loggers() -> AbstractContextManager[Any]:
    """Prevent a MetricsProcessor from opening TensorBoard or wandb in its constructor."""
    # Upstream opens them there, before loading a checkpoint can raise. Replaces
    # ``_build_metric_logger``; if upstream renames it, this raises an AttributeError.
    return patch.object(titan_metrics, "_build_metric_logger", lambda *_: BaseLogger())


def init_optimizer_container(
    container: Any, parameters: list[Any], defaults: dict[str, Any]
) -> None:
    """Run the last part of the constructor of torchtitan's OptimizersContainer."""
    # The constructor builds one torch optimizer per model part; ours are built before, so the
    # constructor is skipped. Calls ``_post_init``, which initializes torch's Optimizer (scheduler
    # hooks) of a container with ``model_parts`` and ``optimizers``. If upstream renames it,
    # building an optimizer fails with an AttributeError.
    container._post_init(parameters, defaults)


class TitanCheckpointHooks(CheckpointManager):
    """torchtitan's manager with public names for private methods, for one that saves otherwise."""

    overdue = False  # whether the step at hand is saved, whatever its number is

    checkpoint_folder = CheckpointManager._create_checkpoint_id  # of a step
    wait_for_save = CheckpointManager._async_wait  # until an asynchronous save is on disk
    states_to_load = CheckpointManager._states_to_load  # the model's alone, or all wanted ones
    # All states, with the model's at the top level.
    flattened_states = CheckpointManager._flattened_model_states_sd

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Return whether `save` saves a step, which may be the last."""
        saves: bool = self.enable and not self.load_only
        return (self.overdue and saves) or super()._should_save(curr_step, last_step)

    is_due = _should_save


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

    def known(activities: list[Any], profile: Any = torch.profiler.profile, **rest: Any) -> Any:
        return profile(activities=[each for each in activities if each is not None], **rest)

    with ExitStack() as until:
        # Upstream has None for a GPU's activity on a CPU, which torch 2.13 refuses.
        with patch.object(torch.profiler, "profile", known):
            times = until.enter_context(maybe_enable_profiling(job_config.profiling, **where))
        memory = until.enter_context(maybe_enable_memory_snapshot(job_config.profiling, **where))
        yield [profiler for profiler in (times, memory) if profiler is not None]
