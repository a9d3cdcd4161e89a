# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The state that a newcomer takes over, and its digest: tensors and plain values, by name."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part


def training_state(model_parts: Sequence[nn.Module], optimizers: Any, schedule: Any) -> Any:
    """Return this rank's weights, optimizer state and schedule.

    The tensors share their memory with those in use.
    """
    return {
        "model": [_weights(part) for part in model_parts],
        "optimizer": [_local(optimizer.state_dict()) for optimizer in optimizers],
        "schedule": schedule.state_dict(),
    }


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
        for name, tensor in _weights(part).items():
            tensor.copy_(saved[name])
    for optimizer, saved in zip(optimizers, state["optimizer"], strict=True):
        optimizer.load_state_dict(saved)
    schedule.load_state_dict(state["schedule"])


def digest(state: Any) -> str:
    """Return the first 16 digits of a SHA-256 over every bit of a state's tensors and numbers."""
    total = hashlib.sha256()
    for name, value in _leaves(state, ""):
        total.update(name.encode())
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            total.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()[:16]


def _weights(part: nn.Module) -> dict[str, Tensor]:
    return {name: local_part(parameter.detach()) for name, parameter in part.named_parameters()}


def _local(state: Any) -> Any:
    """Return a nested state with this rank's parts instead of DTensors."""
    if isinstance(state, Tensor):
        return local_part(state.detach())
    if isinstance(state, Mapping):
        return {key: _local(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_local(value) for value in state]
    return state


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield from _leaves(state[key], f"{name}.{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _leaves(value, f"{name}.{index}")
    else:
        yield name, state
