# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's checkpoint manager, made safe against kills, damage and the wrong model.

A folder is a complete checkpoint once DCP has renamed its ``.metadata`` into place, the last action
of a save. Upstream breaks this rule in two cases: a step that is saved a second time (after a
rewind) is written over files that an old ``.metadata`` still refers to, and a purge may be killed
after it deleted data but not ``.metadata``. This manager therefore renames a folder before it
deletes the contents. Before a load, it compares the files with the manifest of their save, and
changes nothing in the folder until then.
"""

import functools
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from torchtitan_lr.agreement import from_first_rank
from torchtitan_lr.checkpoints import folders, safe_metadata
from torchtitan_lr.checkpoints.manifest import (
    Manifest,
    ManifestWriter,
    SavePlanner,
    UnverifiedError,
    all_finite,
    damage_of,
    newest_whole_before,
    read_manifest,
    read_once,
    write_manifest,
)
from torchtitan_lr.checkpoints.staging import BackgroundStager
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compression.residuals import saved_residuals
from torchtitan_lr.config.files import files_kept
from torchtitan_lr.console.log import console
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import GarbageCollection
from torchtitan_lr.titan.components import DATALOADER, MODEL, AsyncMode, TitanCheckpointHooks
from torchtitan_lr.training.fingerprint import check_fingerprint

P = ParamSpec("P")
R = TypeVar("R")

_LONG = 0.1  # seconds of waiting that the console shows
_MODEL_ALONE, _NOT_FINITE = "it holds only the model", "its weights are not finite"


def _tells_why(save: Callable[P, R]) -> Callable[P, R]:
    """Let a save that fails, here or in the background, raise its cause in one line.

    DCP's own exception derives from BaseException: no ``except Exception`` reports it.
    """

    @functools.wraps(save)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        try:
            return save(*args, **options)
        except CheckpointException as error:
            cause = safe_metadata.describe(next(iter(error.failures.values()))[0])
            raise RunFailedError(f"a checkpoint cannot be written ({cause})") from error

    return wrapped


class CheckpointManager(TitanCheckpointHooks):
    """DCP checkpoints of model, optimizer, schedule, data position and train state.

    Attributes:
        fingerprint: Fingerprint of the model and its tokenizer; saved with it and compared on
            loading, unless it is empty.
        before_save: Called before each save; an exception prevents it.
        left_out: Returns the states that are not loaded at a step (-1: of another run).
        excluded: States that `load` has left out.
    """

    async_mode: AsyncMode
    sd_adapter: Any
    stager: Any
    _last_saved: str | None = None

    def __init__(self, *, checkpoint_config: Any, **parts: Any) -> None:
        self.fingerprint: dict[str, Any] = {}
        # torchtitan's own checkpoint section lacks these keys.
        self._fall_back = getattr(checkpoint_config, "fall_back", False)
        self._other_model = getattr(checkpoint_config, "initial_load_other_model", False)
        self._exclude: list[str] = checkpoint_config.exclude_from_loading
        self._unverified = getattr(checkpoint_config, "allow_unverified", False)
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        # Deletes renamed folders: the other ranks wait for the renaming only.
        self._deletions = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deletions")
        self.before_save: Callable[[], None] = lambda: None
        self.left_out: Callable[[int], list[str]] = lambda step: self._exclude
        self.excluded: list[str] = []
        super().__init__(checkpoint_config=checkpoint_config, **parts)
        self.enable_staging = self.enable and self.async_mode != AsyncMode.DISABLED
        if self.enable and self.async_mode == AsyncMode.ASYNC:
            # In its other mode upstream waits for what a stager copies, and takes any stager.
            self.async_mode = AsyncMode.ASYNC_WITH_PINNED_MEM
            self.stager = BackgroundStager()  # type: ignore[abstract]  # torch's has a body

    def close(self) -> None:
        """Stop upstream's threads and wait for pending deletions."""
        super().close()
        self._deletions.shutdown()

    @_tells_why
    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if the step is due, and purge after the last step too, which upstream does not."""
        started = time.perf_counter()
        due = self.is_due(curr_step, last_step)
        super().save(curr_step, last_step)
        if due:
            in_background = self.async_mode != AsyncMode.DISABLED and not last_step
            how = "started in the background" if in_background else "saved"
            folder, seconds = self.checkpoint_folder(curr_step), time.perf_counter() - started
            console.info("checkpoint %s %s in %.1f s", folder, how, seconds)
        if last_step and self.enable and not self.load_only:
            self._purge_stale_checkpoints()

    @_tells_why
    def maybe_wait_for_staging(self) -> None:
        """Wait until a background save has copied the states; call it before they change.

        The optimizer changes most of them, and a compressor its residual during backward.
        """
        if not (self.enable_staging and self.staging):
            return
        started = time.perf_counter()
        super().maybe_wait_for_staging()
        if (waited := time.perf_counter() - started) >= _LONG:
            console.info("%s: a step waited %.1f s for its copy", self._last_saved, waited)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save with a manifest into an empty folder; arguments as for upstream's method."""
        self.before_save()
        # No rank writes before DCP has gathered the plans of all, and so after this renaming.
        if self._first:
            self._discard(checkpoint_id)
        self._last_saved = checkpoint_id
        if to_hf:  # at the end of a run, never in the background
            from_first_rank(None)  # no rank writes before the first one has renamed the folder
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, True)
            write_manifest(checkpoint_id, _finite_weights(self.states[MODEL].model))
            return None
        weights = self.states[MODEL].state_dict() if MODEL in self.states else ()
        writer = ManifestWriter(checkpoint_id, self.fingerprint, weights=weights)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer, planner=SavePlanner())
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        os.makedirs(writer.path, exist_ok=True)  # `_purge_stale_checkpoints` counts it
        way = AsyncCheckpointerType.THREAD
        if not isinstance(self.stager, BackgroundStager):
            # torch's stager, whose pinned memory a process can share, does not wait for the step
            # itself.
            torch.accelerator.current_stream().synchronize()
            way = AsyncCheckpointerType.PROCESS
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            planner=SavePlanner(),
            process_group=self.pg,
            async_checkpointer_type=way,
            async_stager=self.stager,
        )

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a verified checkpoint; arguments as for upstream's method.

        Raises:
            ConfigError: The checkpoint is damaged, its data position belongs to another corpus,
                order or sequence length, its residuals to other ranks or tensors, or it contains
                another model.
        """
        if from_hf:
            has_manifest = from_first_rank((Path(checkpoint_id) / folders.MANIFEST).is_file())
            if has_manifest and (damage := self._damage_of(checkpoint_id)):
                raise _damaged(checkpoint_id, damage, None)
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        initial = checkpoint_id == self.initial_load_path
        try:
            # `load` has verified the others.
            if initial and (damage := self._damage_of(checkpoint_id)):
                raise _damaged(checkpoint_id, damage, newest_whole_before(checkpoint_id))
            manifest = read_once(self._manifest_of, checkpoint_id)
            if manifest is not None:
                may_differ = self._other_model and initial
                check_fingerprint(
                    manifest.model, self.fingerprint, checkpoint_id, may_differ, self._unverified
                )
            metadata = read_once(safe_metadata.read_metadata, checkpoint_id)
            has_data = state_dict.get(DATALOADER) is not None
            if has_data and not state_dict[DATALOADER].check_checkpoint(checkpoint_id, metadata):
                del state_dict[DATALOADER]  # the data start anew
            if folders.RESIDUALS in state_dict:
                state_dict[folders.RESIDUALS].check_checkpoint(checkpoint_id, metadata)
            elif has_data and saved_residuals(checkpoint_id, metadata):
                logger.warning("The gradient residuals of %s are not loaded", checkpoint_id)
            safe_metadata.load(state_dict, checkpoint_id, metadata=metadata)
        except safe_metadata.DamagedError as error:
            raise ConfigError("checkpoint", checkpoint_id, f"a whole one ({error})") from error
        except CheckpointException as error:  # derives from BaseException
            cause = safe_metadata.describe(next(iter(error.failures.values()))[0])
            want = f"a complete checkpoint of this model ({cause})"
            raise ConfigError("checkpoint", checkpoint_id, want) from error
        if manifest is None and self._first:
            logger.warning("%s has no manifest: loading it without a check", checkpoint_id)
        # The model's states are flattened into the dictionary, so DCP cannot load them itself.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _damage_of(self, folder: str) -> str | None:
        return damage_of(folder, self._unverified)

    def _manifest_of(self, folder: str | Path) -> Manifest | None:
        """Return a checkpoint's manifest; None if it cannot be used and need not be."""
        try:
            return read_manifest(folder)
        except UnverifiedError:
            if not self._unverified:
                raise
            return None

    @files_kept()
    def load(self, step: int = -1) -> bool:
        """Load step ``step``, or at -1 the newest complete one, then rename all later steps.

        A run that resumes an earlier step saves the later ones again. A folder without a complete
        step (a killed first save) is treated as missing, so that ``initial_load_path`` still takes
        effect. Nothing changes on disk before the load has succeeded.

        Raises:
            ConfigError: As for `dcp_load`.
        """
        if not self.enable:
            return False
        if step == -1 and self._first:  # a thousand ranks would list the folder at the same moment
            step = folders.newest_step(self.folder)
        step = from_first_rank(step)
        if step != -1:
            step = self._whole_step(step)
            source, in_hf, model_only = self.checkpoint_folder(step), False, step == 0
            if self.initial_load_path:
                console.info(
                    "checkpoint.initial_load_path is not read: the run has steps of its own."
                )
        else:
            source, in_hf = self.initial_load_path or "", self.initial_load_in_hf
            if in_hf and not source:
                source = self.sd_adapter.hf_assets_path
            model_only = self.initial_load_model_only
        if source:
            names = from_first_rank(self.left_out(step) if self._first else [])
            self.excluded = [name for name in names if name in self.states and not model_only]
            self.exclude_from_loading = self.excluded
            self.dcp_load(self.states_to_load(model_only), source, in_hf, from_quantized=False)
            GarbageCollection.collect("GC collection for checkpoint loading.")
            without = f" without {', '.join(self.excluded)}" if self.excluded else ""
            console.info("Loaded %s%s.", source, without)
            if used := ", ".join(name for name in self._exclude if name not in names):
                console.info("checkpoint.exclude_from_loading has acted before: %s is loaded", used)
        if not self.load_only and self._first:
            self._tidy(step)
        from_first_rank(None)  # no rank saves before the first one is here
        return bool(source)

    def _whole_step(self, step: int) -> int:
        """Return the step itself if its checkpoint is whole, else the step to fall back to.

        Raises:
            ConfigError: The step is damaged, and ``checkpoint.fall_back`` is off or finds none.
        """
        folder = self.checkpoint_folder(step)
        is_dcp = from_first_rank(folders.is_dcp(folder))
        damage = self._damage_of(folder) if is_dcp else _MODEL_ALONE
        if not damage and step and folders.TRAIN_STATE in self.states:
            whole = self._first and folders.holds_training(safe_metadata.read_metadata(folder))
            damage = None if from_first_rank(whole) else _MODEL_ALONE
        if not damage and not from_first_rank(self._first and folders.is_finite(folder)):
            damage = _NOT_FINITE
        if not damage:
            return step
        older = newest_whole_before(folder, self._unverified)
        if older is None or not self._fall_back:
            raise _damaged(folder, damage, older)
        if self._first:
            logger.warning("%s is not resumed (%s): resuming from %s", folder, damage, older)
        return int(older.rpartition("-")[2])

    def _tidy(self, step: int) -> None:
        """Rename the steps after ``step``; delete incomplete folders and unfinished deletions."""
        for found in folders.all_steps(self.folder):
            folder = self.checkpoint_folder(found)
            if not folders.is_complete(folder):
                folders.rename_away(folder, folders.DISCARDED)
            elif found > step:
                logger.warning(
                    "Checkpoint of step %d is renamed to %s",
                    found,
                    folders.rename_away(folder, folders.ASIDE),
                )
        for leftover in glob.glob(os.path.join(glob.escape(self.folder), f"{folders.DISCARDED}*")):
            self._deletions.submit(shutil.rmtree, leftover, ignore_errors=True)

    @_tells_why
    def save_interrupted(self, step: int) -> str | None:
        """Save all of ``step``, even if the last save should hold the model only.

        Returns:
            The checkpoint's folder, None if checkpointing is off.
        """
        if not self.enable or self.load_only:
            return None
        folder = self.checkpoint_folder(step)
        self.wait_for_save()
        # Compare with a remembered path: hosts may see different states of a shared folder.
        if folder != self._last_saved:
            states = self.flattened_states()
            self.dcp_save(states, folder, AsyncMode.DISABLED)
            self._purge_stale_checkpoints()
        return folder

    @_tells_why
    def newest(self, finite: bool = False) -> str | None:
        """Wait for a background save, and return the newest complete checkpoint's folder, if any.

        Call it on every rank; the first one reads. With ``finite``, its weights must be: a step
        with a finite loss and gradient may still make them non-finite.
        """
        if not self.enable:
            return None
        self.wait_for_save()
        return read_once(partial(self._newest_in, finite=finite), self.folder)

    def _newest_in(self, folder: str | Path, finite: bool) -> str | None:
        for step in reversed(folders.complete_steps(folder)):
            found = folders.step_folder(folder, step)
            if not finite or folders.is_finite(found):
                return found
        return None

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or not self._first:
            return
        # The current save counts, complete or not, but no other incomplete folder: it must not
        # displace a complete one.
        paths = [self.checkpoint_folder(step) for step in folders.all_steps(self.folder)]
        kept = [path for path in paths if path == self._last_saved or folders.is_complete(path)]
        for folder in kept[: -self.keep_latest_k]:
            self._discard(folder)

    def _discard(self, folder: str) -> None:
        """Rename a folder, so that it is no checkpoint any more, and delete it meanwhile."""
        if renamed := folders.rename_away(folder, folders.DISCARDED):
            self._deletions.submit(shutil.rmtree, renamed, ignore_errors=True)


def _damaged(folder: str, damage: str, older: str | None) -> ConfigError:
    """Build the error that names the damaged file and the newest whole checkpoint before it."""
    instead = "there is no older whole one"
    if older is not None:
        instead = (
            f"the newest older whole one is {older}: set checkpoint.fall_back = true or "
            f"checkpoint.load_step = {older.rpartition('-')[2]} to resume from it"
        )
    want = "one to resume" if damage in (_MODEL_ALONE, _NOT_FINITE) else "a whole one"
    return ConfigError("checkpoint", folder, f"{want} ({damage}); {instead}")


def _finite_weights(model_parts: Iterable[nn.Module]) -> bool:
    """Return whether every parameter on every rank has a finite norm; call it on every rank."""
    weights = [local_part(p).detach() for part in model_parts for p in part.parameters()]
    finite = torch.tensor(all_finite(weights), dtype=torch.int32, device=weights[0].device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite.item())
