# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The state that a newcomer takes over, and its digest: tensors and plain values, by name."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part


def training_state(model_parts: Sequence[nn.Module], optimizers: Any, schedule: Any) -> Any:
    """Return this rank's weights, optimizer state and schedule.

    The tensors share their memory with those in use.
    """
    return _local(
        {
            "model": [dict(part.named_parameters()) for part in model_parts],
            "optimizer": [optimizer.state_dict() for optimizer in optimizers],
            "schedule": schedule.state_dict(),
        }
    )


@torch.no_grad()
def load_training_state(
    state: Any, model_parts: Sequence[nn.Module], optimizers: Any, schedule: Any
) -> None:
    """Copy a state into the tensors in use.

    Args:
        state: Result of `training_state` on another replica.
        model_parts: The model.
        optimizers: The container of its optimizers.
        schedule: torchtitan's container of schedules.
    """
    for part, saved in zip(model_parts, state["model"], strict=True):
        for name, parameter in part.named_parameters():
            local_part(parameter.detach()).copy_(saved[name])
    for optimizer, saved in zip(optimizers, state["optimizer"], strict=True):
        optimizer.load_state_dict(saved)
    schedule.load_state_dict(state["schedule"])


def digest(state: Any) -> str:
    """Return the first 16 digits of a SHA-256 over every bit of a state's tensors and numbers."""
    total = hashlib.sha256()

    def add(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(value[key], f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                add(item, f"{name}.{index}")
        elif isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            total.update(name.encode() + repr(value).encode())

    add(state, "")
    return total.hexdigest()[:16]


def _local(state: Any) -> Any:
    """Return a nested state with this rank's parts instead of DTensors."""
    if isinstance(state, Tensor):
        return local_part(state.detach())
    if isinstance(state, Mapping):
        return {key: _local(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_local(value) for value in state]
    return state
