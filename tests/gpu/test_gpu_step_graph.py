# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Captured passes of a step give the eager ones' numbers, bit for bit.

On a CPU a recorder of operators stands for CUDA's graphs. A recorded pass runs the same operators
on the same memory, as a graph does. So it shows whether a later pass may be another one: whether it
reads other memory, waits for the host, or leaves its gradients elsewhere.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.gpu.trainers import BATCH, micro_batches, trainer_on
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.capture import why_eager
from torchtitan_lr.training import trainer as trainer_module

STEPS = 6
MIXED = "--training.mixed_precision_param=bfloat16"


class Recorder(TorchDispatchMode):
    """Records each operator of a call with its tensors, and each change of a storage's size."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        # Later the same tensors, whatever then becomes of the Python objects.
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        result = func(*args, **kwargs)
        self.calls.append(lambda: self._repeat(func, args, kwargs, result))
        return result

    @staticmethod
    def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        again = func(*args, **kwargs)
        for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.detach().copy_(new)

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record a pass, which has then run: its first replay does nothing."""
        resize = torch.UntypedStorage.resize_
        self.calls = []

        def noted(storage: Any, size: int) -> Any:
            self.calls.append(lambda: resize(storage, size))
            return resize(storage, size)

        with patch.object(torch.UntypedStorage, "resize_", noted), self:
            loss = work()
        calls, due = self.calls, False

        def replay() -> None:
            nonlocal due
            for call in calls if due else []:
                call()
            due = True

        return loss, replay


THREE = [MIXED, f"--training.global_batch_size={3 * BATCH}"]
ONE = [MIXED, f"--training.global_batch_size={BATCH}"]
RUNS = {
    "two micro-batches": [MIXED],
    "three": THREE,
    "one": ONE,
    "unwrapped": [],
    "full": [MIXED, "--model.name=llama_full"],
    "lax": [MIXED, "--model.name=llama_lax"],
    "low_rank": [MIXED, "--activation_checkpoint.mode=low_rank"],
    "Spectron": [MIXED, "--optimizer.name=Spectron"],
    "compiled": [MIXED, "--compile.enable"],
}


def results(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[list[Tensor], int]:
    """The losses of six steps and the weights after them; the number of captured passes."""
    fused = "--optimizer.implementation=fused"
    with trainer_on(device, folder, monkeypatch, "--optimizer.lr=1e-2", fused, *more) as trainer:
        count = trainer.gradient_accumulation_steps
        batches = (micro_batches(trainer.model_args.vocab_size) * 2)[:count]
        losses = []
        for step in range(STEPS):
            trainer.step = step + 2  # the first is logged
            rolled = [({"input": i["input"].roll(step, 1)}, labels) for i, labels in batches]
            trainer.train_step(iter(rolled))
            losses.append(trainer.loss.cpu().clone())
        (model,), graph = trainer.model_parts, trainer.graph
        weights = [p.detach().cpu().clone() for p in model.parameters()]
        return losses + weights, 0 if graph is None else len(graph.passes)


ON_GPUS = ("one", "unwrapped", "full", "Spectron", "compiled")
"""Runs for which the others stand on a CPU, or that have no operators which it could record."""


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_equal_eager_ones(
    name: str,
    device: torch.device,
    one_rank: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu" and name in ON_GPUS:
        pytest.skip("needs a GPU")
    arguments = RUNS[name]
    eager, passes = results(
        device.type, tmp_path / "a", monkeypatch, *arguments, "--training.step_graph=off"
    )
    assert passes == 0
    if device.type == "cpu":
        monkeypatch.setattr(trainer_module, "CudaCapture", Recorder)
        monkeypatch.setattr(trainer_module, "why_eager", lambda *_: "")
    captured, passes = results(device.type, tmp_path / "b", monkeypatch, *arguments)
    assert passes == (1 if arguments is ONE else 3 if arguments is THREE else 2)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert not torch.equal(eager[0], eager[STEPS - 1])


def test_what_cannot_be_captured_is_refused(tmp_path: Path) -> None:
    config = build_job_config(["--training.step_graph=on", f"--job.dump_folder={tmp_path}"])
    with pytest.raises(ConfigError, match=r"training.step_graph: got 'on'.*CUDA graphs need a GPU"):
        check_job_config(config, 1, "cpu", data="none")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--training.step_graph=off", "is 'off'"),
        ("--parallelism.pipeline_parallel_degree=2", "pipeline's schedule"),
        ("--grad_compression.codec=sparse", "gradient codec"),
        ("--training.enable_cpu_offload", "copies through the host"),
        ("--training.mask_documents", "another mask"),
        ("--optimizer.name=TSRAdam", "as backward makes them"),
        ("--activation_checkpoint.mode=full", "random numbers' state"),
        ("--parallelism.fsdp_reshard_after_forward=always", "another stream"),
    ],
)
def test_a_pass_that_cannot_be_captured_has_one_reason(argument, reason):
    assert reason in why_eager(build_job_config([argument]), "cuda")
    assert why_eager(build_job_config([]), "cuda") == ""
