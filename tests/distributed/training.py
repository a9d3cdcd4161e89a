# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs of the trainer on the ranks of a pool: with deliberate faults, set up once per process."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import parity_runs
from tests.support.rank_pool import new_folder
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.titan.base import ParallelDims
from torchtitan_lr.training import figures
from torchtitan_lr.training.trainer import Trainer


def train(
    arguments: list[str],
    fault: str = "",
    dump_folder: str = "",
    exact: bool = True,
    everywhere: bool = False,
) -> dict[str, Any]:
    """`parity_runs.train` with a fault or none; call it on every rank."""
    with (
        patch.object(figures, "draw_curve"),  # whole runs draw theirs in tests/integration
        known_setup(),
    ):
        build = partial(_trainer_with, fault)
        return parity_runs.train(arguments, dump_folder, exact, everywhere, build)


@contextmanager
def small_trainer(arguments: list[str]) -> Iterator[Any]:
    """Build the trainer of a checked `TINY` run, and close it at the end; call it on every rank."""
    folders: list[Any] = [new_folder()]
    dist.broadcast_object_list(folders)
    folder = f"--job.dump_folder={folders[0]}"
    config = build_job_config([*parity_runs.TINY, folder, *arguments])
    with known_setup(), parity_runs.checked(config):
        trainer = Trainer(config)
        yield trainer
    trainer.close()


@contextmanager
def known_setup() -> Iterator[None]:
    """Make equal runs share their meshes, but take none of an earlier run from DTensor's cache."""
    # FSDP2 concatenates the meshes of tensor parallelism anew for every parameter; the cache would
    # give parameters an equal mesh that has other groups.
    _clear_sharding_prop_cache()
    with (
        patch.object(ParallelDims, "build_mesh", _build_meshes_once),
        patch.object(DeviceMesh, "_concatenate", staticmethod(_concatenate_once)),
    ):
        yield


_MESHES: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_BUILD_MESHES = ParallelDims.build_mesh
_CONCATENATED: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}
_CONCATENATE = DeviceMesh._concatenate


def _build_meshes_once(dims: ParallelDims) -> DeviceMesh:
    key = tuple(getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_"))
    if key not in _MESHES:
        _BUILD_MESHES(dims)
        _MESHES[key] = dims._world_mesh, dims._global_meshes, dims._meshes
    dims._world_mesh, dims._global_meshes, dims._meshes = _MESHES[key]
    return _MESHES[key][0]


def _concatenate_once(meshes: list[DeviceMesh]) -> DeviceMesh:
    key = tuple(map(id, meshes))
    if key not in _CONCATENATED:  # holds the meshes, so that no other one gets their ids
        _CONCATENATED[key] = meshes, _CONCATENATE(meshes)
    return _CONCATENATED[key][1]


def _trainer_with(fault: str, config: Any) -> Any:
    kind, _, at = fault.partition("@")
    guilty = dist.get_rank() == min(1, dist.get_world_size() - 1)

    class FaultyTrainer(Trainer):
        spoilt = False  # once

        def one_pass(self, **kwargs: Any) -> Any:
            if not guilty or str(self.step) != at:
                return super().one_pass(**kwargs)
            if kind == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
                return super().one_pass(**kwargs)
            blocks = list(self.model_parts[-1].get_submodule("layers").children())
            handle = None
            if kind == "nan_weight":
                local_part(blocks[-1].get_parameter("attention.wo.B.weight").data)[0] = math.nan
            if kind == "nan_block":
                handle = blocks[0].register_forward_hook(_spoil, prepend=True)
            if kind == "slow":
                handle = blocks[0].register_forward_hook(lambda *_: time.sleep(0.1), prepend=True)
            loss = super().one_pass(**kwargs)
            if handle is not None:
                handle.remove()
            if kind == "nan_sum":
                gradient = blocks[-1].get_parameter("ffn_norm.weight").grad
                local_part(gradient).fill_(float("nan"))
            spoils = kind == "nan" or (kind == "nan_once" and not self.spoilt)
            self.spoilt = True
            return loss * float("nan") if spoils else loss

    return FaultyTrainer(config)


def _spoil(block: Any, args: Any, output: Any) -> Any:
    x, *latents = output if isinstance(output, tuple) else (output,)
    x = x.clone()
    x.view(-1)[0] = float("nan")
    return (x, *latents) if isinstance(output, tuple) else x


@contextmanager
def spoil_last_block(model_parts: list[Any]) -> Iterator[None]:
    """Make one entry of the gradient of the output of rank 1's last block NaN."""
    if dist.get_rank() != min(1, dist.get_world_size() - 1):
        yield
        return
    blocks = [block for part in model_parts for block in part.get_submodule("layers").children()]
    handle = blocks[-1].register_forward_hook(_spoil_gradient)
    yield
    handle.remove()


def _spoil_gradient(block: Any, args: Any, output: Any) -> None:
    def spoilt(gradient: Any) -> Any:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("nan")
        return gradient

    (output[0] if isinstance(output, tuple) else output).register_hook(spoilt)
