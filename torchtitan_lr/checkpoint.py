# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's checkpoint manager, made safe against a kill at any moment.

A folder counts as a checkpoint once DCP has renamed its ``.metadata`` into place, the last act of
a save. Two cases break that promise upstream: a step that is saved a second time (after a rewind)
is written over files that an old ``.metadata`` still vouches for, and a purge may be killed with
``.metadata`` alive and data gone. Here a folder loses its name before its contents.
"""

import os
import re
import shutil
import threading
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpoint import DATALOADER, AsyncMode
from torchtitan.components.checkpoint import CheckpointManager as TitanCheckpointManager
from torchtitan.tools.logging import logger

from torchtitan_lr.comm.residuals import STATE_NAME, warn_of_dropped_residuals
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.lane_record import ORDINARY, Lanes, check_lanes, record_of

_STEP_FOLDER = re.compile(r"step-(\d+)")
_DISCARDED = "discarded-"


class CheckpointManager(TitanCheckpointManager):
    """DCP checkpoints of model, optimizer, schedule, data position and train state.

    Attributes:
        lanes: Of the model; saved with it, and compared when a checkpoint is loaded.
    """

    lanes: Lanes = ORDINARY
    _last_saved: str | None = None

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """Save into a folder that holds nothing yet; arguments as upstream's."""
        if _is_first_rank():
            _discard(checkpoint_id)
        _barrier()
        self._last_saved = checkpoint_id
        if not to_hf:
            state_dict = {**state_dict, **record_of(self.lanes)}
        return super().dcp_save(
            state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
        )

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load; arguments as upstream's.

        Raises:
            ConfigError: A full checkpoint's data position belongs to another batch or corpus, or
                the folder does not hold this model.
        """
        if not from_hf and DATALOADER in state_dict and state_dict[DATALOADER] is not None:
            state_dict[DATALOADER].check_checkpoint(checkpoint_id)
        if STATE_NAME in state_dict:
            state_dict[STATE_NAME].check_checkpoint(checkpoint_id)
        elif DATALOADER in state_dict and not from_hf:
            warn_of_dropped_residuals(checkpoint_id)
        try:
            if not from_hf:
                check_lanes(checkpoint_id, self.lanes)
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        except CheckpointException as error:  # no Exception, so nobody else catches it
            cause = next(iter(error.failures.values()))[0]
            want = f"a complete checkpoint of this model ({cause})"
            raise ConfigError("checkpoint", checkpoint_id, want) from error

    def load(self, step: int = -1) -> bool:
        """Load step ``step``, or the newest complete one; what follows it is put aside.

        A run that goes back to an earlier step writes the later ones anew. A folder without any
        complete step, as a kill in the first save leaves it, counts as no folder, so that
        ``initial_load_path`` still takes effect.

        Args:
            step: The step, -1 for the newest.

        Returns:
            Whether anything was loaded.
        """
        if self.enable and not self.load_only and _is_first_rank() and os.path.isdir(self.folder):
            newest = self._find_load_step()
            for found in self._steps():
                if found > (newest if step == -1 else step):
                    renamed = _rename_away(self._create_checkpoint_id(found))
                    logger.warning("Checkpoint of step %d is put aside as %s", found, renamed)
            # Upstream looks at initial_load_path only where there is no folder at all.
            if newest == -1 and all(n.startswith(_DISCARDED) for n in os.listdir(self.folder)):
                _rename_away(self.folder)
        _barrier()
        return bool(super().load(step))

    def save_interrupted(self, step: int) -> str | None:
        """Save everything needed to go on from ``step``, whatever the last save should contain.

        Args:
            step: The last finished step.

        Returns:
            The checkpoint's folder, None where checkpointing is off.
        """
        if not self.enable or self.load_only:
            return None
        folder = self._create_checkpoint_id(step)
        self._async_wait()
        # Every rank remembers what it saved: looking at the folder could differ between hosts.
        if folder != self._last_saved:
            states = self._flattened_model_states_sd()
            self.dcp_save(states, folder, AsyncMode.DISABLED)
        return folder

    def last_good(self) -> str | None:
        """Return the newest complete checkpoint's folder, None if there is none."""
        if not self.enable:
            return None
        self._async_wait()
        step = self._find_load_step()
        return None if step == -1 else self._create_checkpoint_id(step)

    def finish(self) -> None:
        """Wait until a save in the background is on disk."""
        if self.enable:
            self._async_wait()

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or not _is_first_rank() or not os.path.isdir(self.folder):
            return
        # The save at hand counts, complete or not; a torn folder must not push a good one out.
        steps = [
            step
            for step in self._steps()
            if (folder := self._create_checkpoint_id(step)) == self._last_saved
            or os.path.isfile(os.path.join(folder, ".metadata"))
        ]
        for step in steps[: -self.keep_latest_k]:
            renamed = _rename_away(self._create_checkpoint_id(step))
            if renamed is not None:
                self.purge_queue.put(renamed)

    def _steps(self) -> list[int]:
        """Return the steps that have a folder, complete or not, in order."""
        matches = map(_STEP_FOLDER.fullmatch, os.listdir(self.folder))
        return sorted(int(match.group(1)) for match in matches if match)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _rename_away(folder: str) -> str | None:
    """Give a checkpoint folder a name that no resume looks for; one atomic step."""
    if not os.path.isdir(folder):
        return None
    parent, name = os.path.split(folder.rstrip("/"))
    target = os.path.join(parent, f"{_DISCARDED}{name.removeprefix('step-')}-{os.getpid()}")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(folder, target)
    return target


def _discard(folder: str) -> None:
    """Rename at once, delete in the background: other ranks wait for the name alone."""
    renamed = _rename_away(folder)
    if renamed is not None:
        threading.Thread(target=shutil.rmtree, args=(renamed, True), daemon=True).start()
