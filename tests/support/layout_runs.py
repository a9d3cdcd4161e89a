# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One run in a layout, watched: its gradients, bytes, memory, a resume, and a rejected step."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.training import known_setup, spoil_last_block
from tests.support import parity_runs
from tests.support.documents import masks_of_blocks
from tests.support.parity_runs import full_parameters, largest_difference
from torchtitan_lr.checkpoints.folders import OUTER, RESIDUALS
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.models import ends
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.optim.tsr import algorithm
from torchtitan_lr.titan import logger
from torchtitan_lr.training import figures
from torchtitan_lr.training.trainer import Trainer

CHUNK = 50
"""Tokens of a chunk of the head's loss."""

BUCKET = 5000
"""Elements of a bucket of TSR-Adam."""


class Watched(Trainer):
    """Notes what the first step leaves, and what every step sends."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first: dict[str, Any] = {}
        self.sent: list[list[dict[str, Any]]] = []
        save: Any = self.checkpointer.save
        # Nothing loads the last step.
        self.checkpointer.save = lambda step, last_step: None if last_step else save(step)

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.sent.append(self._ledger.rows() if self._ledger else [])
        if self.step == 1:
            # Replicas that train apart have their own.
            parts = self.model_parts if self.outer is None else []
            self.first = self._held() | {"parameters": full_parameters(parts)}
            # TSR-Adam's are those of one replica.
            own = [] if hasattr(self.optimizers, "gradients") else parts
            self.first["gradients"] = full_parameters(own, what=lambda parameter: parameter.grad)

    def _held(self) -> dict[str, Any]:
        """Return the bytes of this rank's parts of weights, gradients and states."""
        parameters = [p for part in self.model_parts for p in part.parameters()]
        states = [s for o in self.optimizers.optimizers for s in o.state.values()]
        values = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        if self.outer is not None:
            for kind in (self.outer.common, self.outer.momentum, self.outer.residual):
                values += kind.values()
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = {"weights": parameters, "gradients": gradients, "optimizer": values}
        return {"held": {name: bytes_of(found) for name, found in tensors.items()}}

    def reject_a_step(self) -> dict[str, Any]:
        """Take a step with a NaN in one rank's backward, then a good one.

        What is saved and ``changed`` by the first; whether the other ``trains``; ``warnings``.
        """
        batches, warnings = iter(self.dataloader), []
        self.metrics_processor.should_log = lambda step: False  # the curve is that of the run
        before = self._saved_tensors()
        self.step += 1
        with (
            spoil_last_block(self.model_parts),
            patch.object(logger, "warning", lambda text, *rest: warnings.append(text % rest)),
        ):
            super().train_step(batches)
        after = self._saved_tensors()
        assert before.keys() <= after.keys()  # after an exchange no replica's own weights are saved
        changed = [name for name, value in before.items() if not value.equal(after[name])]
        self.step += 1
        super().train_step(iter(self.dataloader))
        weights = [local_part(p).detach() for part in self.model_parts for p in part.parameters()]
        finite = all(bool(weight.isfinite().all()) for weight in weights)
        moved = self._saved_tensors()
        trains = finite and any(not value.equal(moved[name]) for name, value in after.items())
        return {"changed": changed, "trains": trains, "warnings": warnings}

    def _saved_tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's weights, and of the optimizers' and codecs' states."""
        found: dict[str, torch.Tensor] = {}
        for name in ("model", "optimizer", RESIDUALS, OUTER):
            if name in self.checkpointer.states:
                _collect(name, self.checkpointer.states[name].state_dict(), found)
        _collect("own", [*trained_parameters(*self.model_parts).values()], found)
        return found


def _collect(name: str, value: Any, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = local_part(value).detach().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{name}.{index}", item, found)


def bytes_of(tensors: list[Any]) -> int:
    """Return the bytes of this rank's parts, each once however many share it."""
    parts = [local_part(tensor) for tensor in tensors]
    seen = {(p.data_ptr(), p.numel() or id(p)): p.numel() * p.element_size() for p in parts}
    return sum(seen.values())


def run(arguments: list[str], folder: str = "", rejects: bool = False) -> dict[str, Any]:
    """Train in fp64, or in the bf16 that the arguments say; call it on every rank.

    Added to what `parity_runs.train` returns are ``first`` (of the first step: gathered
    ``gradients`` and ``parameters``, bytes ``held``), ``sent`` (the ledger's rows of every step),
    ``ranks`` (this rank's place in the mesh) and ``rejected`` (see `Watched.reject_a_step`).
    """
    found: dict[str, Any] = {}

    class Run(Watched):
        def train(self) -> None:
            super().train()
            dims = self.parallel_dims
            meshes = {name: dims.get_optional_mesh(name) for name in ("pp", "fsdp")}
            found["ranks"] = {n: 0 if m is None else m.get_local_rank() for n, m in meshes.items()}
            found["first"], found["sent"] = self.first, self.sent

        def close(self) -> None:
            if rejects:
                found["rejected"] = self.reject_a_step()
            super().close()

    with (
        patch.object(figures, "draw_curve"),
        # Small models in several chunks and buckets, as large ones are.
        patch.object(ends, "chunk_tokens", lambda tokens, dim: CHUNK),
        patch.object(algorithm, "BUCKET_ELEMENTS", BUCKET),
        known_setup(),
    ):
        result = parity_runs.train(arguments, folder, build=Run)
    return result | found


def examine(arguments: list[str], other: str, masks: bool) -> dict[str, Any]:
    """Train to the end, resume from the middle, and reject a step; call it on every rank."""
    with masks_of_blocks() if masks else patch.dict({}):
        whole = run([*arguments, "--metrics.comm_ledger"])
        if dist.get_rank() == 0:
            shutil.copytree(whole["dump_folder"], other, dirs_exist_ok=True)
        dist.barrier()
        again = [*arguments, f"--checkpoint.load_step={whole['step'] // 2}"]
        resumed = run(again, whole["dump_folder"], rejects=True)
    difference = largest_difference(resumed, whole) if dist.get_rank() == 0 else 0.0
    logged = all(resumed[name] == whole[name] for name in ("losses", "grad_norms", "val_losses"))
    whole["resumed"] = {"difference": difference, "logged": logged}
    return whole | {"rejected": resumed["rejected"]}


def go_on(arguments: list[str], folder: str) -> dict[str, Any]:
    """Resume a run in another layout; call it on every rank."""
    first = min(
        int(path.name.removeprefix("step-")) for path in Path(folder, "checkpoint").iterdir()
    )
    return run([*arguments, f"--checkpoint.load_step={first}"], folder)
