# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A replica's state: what a newcomer takes over, its digest, its positions, its checkpoints."""

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_lr.checkpoints.safe_metadata import load
from torchtitan_lr.compat.dispatch import keystr, tree_leaves_with_path, tree_map_only
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.errors import require
from torchtitan_lr.training.checkpoint import CheckpointManager
from torchtitan_lr.training.trainer import Trainer

_KEY = "replicas"


def training_state(trainer: Trainer) -> Any:
    """Return this rank's weights, optimizer state and schedule, in the memory of those in use."""
    state = {
        "model": [dict(part.named_parameters()) for part in trainer.model_parts],
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedule": trainer.lr_schedulers.state_dict(),
    }
    return tree_map_only(Tensor, lambda x: local_part(x.detach()), state)


@torch.no_grad()
def load_training_state(trainer: Trainer, state: Any) -> None:
    """Copy another replica's `training_state` into the tensors in use."""
    for part, saved in zip(trainer.model_parts, state["model"], strict=True):
        for name, parameter in part.named_parameters():
            local_part(parameter.detach()).copy_(saved[name])
    for optimizer, saved in zip(trainer.optimizers, state["optimizer"], strict=True):
        optimizer.load_state_dict(saved)
    trainer.lr_schedulers.load_state_dict(state["schedule"])


def digest(state: Any) -> str:
    """Return the first 16 digits of a SHA-256 over every bit of a state's tensors and numbers."""
    total, leaves = hashlib.sha256(), tree_leaves_with_path(state)
    for name, value in sorted((keystr(path), value) for path, value in leaves):
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            total.update(name.encode() + repr(value).encode())
    return total.hexdigest()[:16]


class ReplicaCheckpoints(CheckpointManager):
    """A checkpoint manager that saves only while its replica is the one that writes.

    The folder is common to all replicas, so loading does not tidy it up: what looks like a rest of
    a killed save may be the save of another replica.

    Attributes:
        writes: Whether this replica saves.
        run_ends: Whether too few replicas remain after a stop signal, so that the state is saved.
    """

    writes = False
    run_ends = False

    def _tidy(self, step: int) -> None:
        """Leave the common folder as it is."""

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if this replica writes and the step is due."""
        if self.writes:
            super().save(curr_step, last_step)

    def save_interrupted(self, step: int) -> str | None:
        """Save before an early end of the whole run, not when this replica alone leaves."""
        return super().save_interrupted(step) if self.writes and self.run_ends else None


class DataPositions:
    """Committed steps of each part of the data: replica i reads the i-th of ``group_size`` parts.

    A row is a pure function of its number, so a newcomer goes on where its part stopped, and
    nothing is read twice. In a checkpoint this takes the place of a loader's position.

    Args:
        parts: Number of parts.
        split: What gives a part its rows: rows per step of all parts, and of one.
        loader: The loader of this rank, whose corpus and order a checkpoint records.

    Attributes:
        taken: Committed steps of each part.
    """

    def __init__(self, parts: int, split: tuple[int, int], loader: TokenDataLoader) -> None:
        self.taken = [0] * parts
        self._split, self._loader = list(split), loader

    def state_dict(self) -> dict[str, Any]:
        """Return the positions as one line of JSON, which any number of replicas can load."""
        line = json.dumps({"taken": self.taken, "split": self._split})
        return {_KEY: line, "corpus": self._loader.dataset.identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over stored positions; `check_checkpoint` has compared their number of parts."""
        self.taken = [int(count) for count in json.loads(state_dict[_KEY])["taken"]]

    def check_checkpoint(self, checkpoint_id: str, metadata: Metadata) -> bool:
        """Compare a checkpoint's data and their split; call this before loading it.

        Returns:
            Whether its positions can be loaded. False if the data start anew instead.

        Raises:
            ConfigError: It was written by a run without replicas that come and go, with another
                ``group_size``, by replicas that read other rows, or with other data.
        """
        ours = f"dataloader.{_KEY}" in metadata.state_dict_metadata
        want = f"false: {checkpoint_id} was written without it"
        require(ours, "fault_tolerance.enable", True, want)
        stored = {"dataloader": {_KEY: ""}}
        load(stored, checkpoint_id, no_dist=True, metadata=metadata)
        found = json.loads(stored["dataloader"][_KEY])
        parts, here = len(found["taken"]), len(self.taken)
        want = f"{parts} as in the checkpoint, whose data are split into as many parts"
        require(parts == here, "fault_tolerance.group_size", here, want)
        want = (
            "a number that with training.local_batch_size gives a replica the rows that it has in "
        )
        want += checkpoint_id
        require(found["split"] == self._split, "NGPU", dist.get_world_size(), want)
        return self._loader.check_checkpoint(checkpoint_id, metadata, _KEY)
