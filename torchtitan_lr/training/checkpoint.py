# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's checkpoint manager, made safe against kills, damage and the wrong model.

A folder is a complete checkpoint once it has a ``step.json``, the last file of a save. Upstream
writes a step that is saved a second time (after a rewind) over the old files, and a purge may be
killed after it deleted some of them. This manager therefore renames a folder before it deletes the
contents. Before a load, it compares the files with the record of their save, and changes nothing
in the folder until then.
"""

import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from torchtitan_lr.agreement import from_all_ranks, from_first_rank
from torchtitan_lr.checkpoints import folders, safe_metadata, saving
from torchtitan_lr.checkpoints.record import (
    DamagedError,
    Identity,
    Record,
    Start,
    check_start,
    describe,
    start_of,
)
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.console.log import console
from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import GarbageCollection
from torchtitan_lr.titan.components import MODEL, AsyncMode, TitanCheckpointHooks

_SAVE_SHARE = 20  # saves by time take at most one part in so many of the time


@contextmanager
def _told() -> Iterator[None]:
    """Let a save that fails, here or in the background, raise its cause in one line."""
    try:
        yield
    except CheckpointException as error:  # a BaseException: no ``except Exception`` reports it
        raise RunFailedError(f"a checkpoint cannot be written ({_cause(error)})") from error


class CheckpointManager(TitanCheckpointHooks):
    """DCP checkpoints of model, optimizer, schedule, data position and train state.

    Moments and steps are loaded; rates and other hyperparameters are the configured ones: see
    `load_state_dict` of `optim.containers.NamedOptimizers` and `ConfiguredRates`.
    """

    async_mode: AsyncMode
    save_future: Future[Any] | None = None  # upstream sets it where it saves
    sd_adapter: Any
    _last_saved: str | None = None  # a path: hosts may see different states of a shared folder

    def __init__(self, *, checkpoint_config: Any, **parts: Any) -> None:
        self.identity: Identity = {}  # of the run's states: saved with them, compared on loading
        self.run: Mapping[str, Any] = {}  # the run's record, which every saved step has
        self.resumed: Record | None = None  # the record of the own step that was loaded
        self.excluded: list[str] = []  # its states that were not loaded
        # Called before each save; an exception prevents it.
        self.before_save: Callable[[], None] = lambda: None
        self._section, self._dump_folder = checkpoint_config, str(parts.get("base_folder", ""))
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        # The end and the length of the last save, in seconds.
        self._saved_at, self._save_seconds = time.monotonic(), 0.0
        # Deletes renamed folders: the other ranks wait for the renaming only.
        self._deletions = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deletions")
        super().__init__(checkpoint_config=checkpoint_config, **parts)

    def close(self) -> None:
        """Stop upstream's threads and wait for pending deletions."""
        super().close()
        self._deletions.shutdown()

    @_told()
    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if the step is due, and purge after the last step too, which upstream does not."""
        started = time.perf_counter()
        due = self.is_due(curr_step, last_step)
        super().save(curr_step, last_step)
        if due:
            in_background = self.async_mode != AsyncMode.DISABLED and not last_step
            how = "copied for a background write" if in_background else "saved"
            folder, seconds = self.checkpoint_folder(curr_step), time.perf_counter() - started
            console.info("checkpoint %s %s in %.1f s", folder, how, seconds)
            self._saved_at, self._save_seconds, self.overdue = time.monotonic(), seconds, False
        if last_step and self.enable and not self.load_only:
            self._purge_stale_checkpoints()

    def is_late(self) -> bool:
        """Return, on the first rank alone, whether a save is due by ``checkpoint.minutes``."""
        minutes, writes = self._section.minutes, self.save_future and not self.save_future.done()
        longest = max(60 * minutes, _SAVE_SHARE * self._save_seconds)
        # The next save would wait for one that is still written in the background.
        can_save = self._first and minutes > 0 and not writes
        return can_save and time.monotonic() - self._saved_at > longest

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save with a record into an empty folder; arguments as for upstream's method."""
        self.before_save()
        # No rank writes before DCP has gathered the plans of all, and so after this renaming.
        if self._first:
            self._discard(checkpoint_id)
        self._last_saved = checkpoint_id
        if to_hf:  # at the end of a run, never in the background
            from_first_rank(None)  # no rank writes before the first one has renamed the folder
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, True)
            own = map(local_part, self.states[MODEL].state_dict().values())
            finite = all(from_all_ranks(saving.all_finite(own)))
            saving.write_record(checkpoint_id, Record(self._states_of({}), self.run, finite=finite))
            return None
        names = [*self.states[MODEL].state_dict()] if MODEL in self.states else []
        if folders.OUTER in state_dict:
            own = state_dict[folders.OUTER].state_dict()
            names += [f"{folders.OUTER}.{name}" for name in own]
        record = Record(self._states_of(state_dict), self.run)
        writer = saving.StepWriter(checkpoint_id, record, weights=names)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer, planner=saving.SavePlanner())
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        if self._first:  # `_purge_stale_checkpoints` counts it
            os.makedirs(writer.path, exist_ok=True)
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            planner=saving.SavePlanner(),
            process_group=self.pg,
        )

    def _states_of(self, saved: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Return the names of the states in a save with what each belongs to."""
        # Residuals of units that are all too small to compress have nothing to save.
        known = self.identity if folders.TRAIN_STATE in saved else {}
        names = [name for name in folders.TRAINING_STATES if name in saved or name in known]
        return {name: self.identity.get(name, {}) for name in (MODEL, *names)}

    def load(self, step: int = -1) -> bool:
        """Load step ``step``, or at -1 the newest complete one, then rename all later steps.

        A run that resumes an earlier step saves the later ones again. Nothing changes on disk
        before the load has succeeded.
        """
        if not self.enable:
            return False
        # A thousand ranks would list the folder at the same moment.
        found = start_of(self._section, self._dump_folder, step) if self._first else None
        start = from_first_rank(found)
        if start is not None:
            if start.step != -1:  # machines may mount the folder at other places
                start = replace(start, folder=self.checkpoint_folder(start.step))
            self._read(start)
            GarbageCollection.collect("GC collection for checkpoint loading.")
            without = f" without {', '.join(self.excluded)}" if self.excluded else ""
            console.info("Loaded %s%s.", start.folder, without)
            if not start.left_out and self._section.exclude_from_loading:
                console.info("All states are loaded: exclude_from_loading acts with load_step")
            if start.step != -1 and self._section.initial_load_path:
                console.info("checkpoint.initial_load_path is not read: the run has its own steps")
        if not self.load_only and self._first:
            self._tidy(-1 if start is None else start.step)
        from_first_rank(None)  # no rank saves before the first one is here
        self._saved_at = time.monotonic()
        return start is not None

    def _read(self, start: Start) -> None:
        """Verify the files of a checkpoint, and load them."""
        folder, record = start.folder or self.sd_adapter.hf_assets_path, None
        here = [] if start.model_only else self.states
        self.excluded = [name for name in start.left_out if name in here]
        self.exclude_from_loading = self.excluded
        states = self.states_to_load(start.model_only)
        try:
            # Weights in Hugging Face's format may be of another program.
            if not start.in_hf or from_first_rank(folders.is_complete(folder)):
                record = saving.verified(folder)
            if start.in_hf:
                return self.dcp_load(states, folder, from_hf=True, from_quantized=False)
            assert record is not None
            check_start(start, record, self.identity, self._dump_folder)
            metadata = saving.read_once(safe_metadata.read_metadata, folder)
            if folders.OUTER in here:
                names = metadata.state_dict_metadata
                self.states[folders.OUTER].expect(names, whole=folders.OUTER in states)
            safe_metadata.load(states, folder, metadata)
        except (DamagedError, CheckpointException) as error:  # the latter is no Exception
            cause = error if isinstance(error, DamagedError) else _cause(error)
            want = f"a whole one of this model ({cause})"
            raise start.refusal(self._dump_folder, "checkpoint", folder, want) from error
        # The model's states are flattened into the dictionary, so DCP cannot load them itself.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(states)
        self.resumed = record if start.step > 0 else None

    def _tidy(self, step: int) -> None:
        """Rename the steps after ``step`` and incomplete ones; delete what killed saves left."""
        for found in folders.all_steps(self.folder):
            folder = self.checkpoint_folder(found)
            complete = folders.is_complete(folder)
            if complete and found <= step:
                continue
            # Without a table of contents it is what a kill left, and of use to nobody.
            kept = complete or folders.has_contents(folder)
            renamed = folders.rename_away(folder, folders.ASIDE if kept else folders.DISCARDED)
            why = "later than the loaded step" if complete else f"without {folders.STEP_FILE}"
            logger.warning("%s is %s: renamed to %s", folder, why, renamed)
        for leftover in glob.glob(os.path.join(glob.escape(self.folder), f"{folders.DISCARDED}*")):
            self._deletions.submit(shutil.rmtree, leftover, ignore_errors=True)

    @_told()
    def save_interrupted(self, step: int) -> str | None:
        """Save all of ``step``, also of the last one; return its folder, None if none is saved."""
        if not self.enable or self.load_only:
            return None
        folder = self.checkpoint_folder(step)
        self.wait_for_save()
        if folder != self._last_saved:
            states = self.flattened_states()
            self.dcp_save(states, folder, AsyncMode.DISABLED)
            self._purge_stale_checkpoints()
        return folder

    @_told()
    def newest(self) -> str | None:
        """Wait for a background save; return the folder of the step that a resume begins with.

        Its weights are finite: a step with a finite loss and gradient may still spoil them. Call it
        on every rank.
        """
        if not self.enable:
            return None
        self.wait_for_save()
        found = None
        if self._first and (step := folders.newest_step(self.folder)) != -1:
            folder = self.checkpoint_folder(step)
            found = folder if folders.is_finite(folder) else None
        return from_first_rank(found)

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or not self._first:
            return
        # The current save counts, complete or not, but no other incomplete folder: it must not
        # displace a complete one.
        paths = [self.checkpoint_folder(step) for step in folders.all_steps(self.folder)]
        kept = [path for path in paths if path == self._last_saved or folders.is_complete(path)]
        for folder in kept[: -self.keep_latest_k]:
            step, every = int(folder.rpartition("-")[2]), self._section.keep_every
            if not every or step % every:
                self._discard(folder)

    def _discard(self, folder: str) -> None:
        """Rename a folder, so that it is no checkpoint any more, and delete it meanwhile."""
        if renamed := folders.rename_away(folder, folders.DISCARDED):
            self._deletions.submit(shutil.rmtree, renamed, ignore_errors=True)


def _cause(error: CheckpointException) -> str:
    """Return the first cause of a failed save or load, in one line."""
    return describe(next(iter(error.failures.values()))[0])
