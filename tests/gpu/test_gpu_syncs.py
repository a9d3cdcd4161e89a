# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The host queues a step without waiting for the device, but for where it has to.

Checked are the parts of a step from forward to the optimizer, and the four phases of a codec. Not
checked, since these wait today:

- `Trainer.settle` waits for the verdict, after the step is queued;
- Adam that is not fused reads the verdict before it steps;
- what a logged step reads.

The refreshes of TSR-Adam are checked without replicas; these compare their bases, and read the
result after the step (`TSRAdam.settle`).
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import adam

from tests.gpu.trainers import MICRO_BATCHES, micro_batches, no_synchronization, trainer_on
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.compression.codecs import Codec, SparseCodec, left_over
from torchtitan_lr.compression.sketch import SketchCodec
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.entries import build_optimizers
from torchtitan_lr.optim.spectral.rules import RULES
from torchtitan_lr.optim.tsr import stack
from torchtitan_lr.training import trainer as trainer_module
from torchtitan_lr.training.trainer import Trainer
from torchtitan_lr.training.verdict import Findings, Verdict

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "float": lambda x: 2.0 * float(x[0]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_noticed(read: Callable[[Tensor], Any], unread_device: torch.device) -> None:
    x = torch.ones(3, device=unread_device)
    with pytest.raises((RuntimeError, NotImplementedError)), no_synchronization(unread_device):
        read(x)
    with no_synchronization(unread_device):
        assert (x + 1).device == x.device


@pytest.mark.parametrize(
    "codec", [SparseCodec(2, theta=0.9), SketchCodec(2, 4, 0.9)], ids=["sparse", "sketch"]
)
def test_codecs(codec: Codec, unread_device: torch.device) -> None:
    rows = torch.ones(2, 1001, device=unread_device)
    with torch.compiler.set_stance("force_eager" if unread_device.type == "meta" else "default"):
        _reduce(codec, rows)  # compiles
        with no_synchronization(unread_device):
            total, owed = _reduce(codec, rows)
    assert total.shape == (1001,) and owed.shape == (2, 1001)


def _reduce(codec: Codec, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce as one of two equal ranks does."""
    message = codec.encode(rows.clone(), 3)
    received = {name: x[:1].expand_as(x) for name, x in message.swapped.items()}
    received |= {name: 2 * x[0] for name, x in message.summed.items()}
    decoded = codec.decode(received, rows.shape[1], 3)
    failed = None if decoded.failed is None else decoded.failed.expand(2, -1)
    return decoded.total, left_over(rows.clone(), message, failed)


RUNS = {
    "AdamW": [],
    "checkpointed": ["--activation_checkpoint.mode=low_rank"],
    "TSR-Adam": ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=8"],
    **{rule: [f"--optimizer.name={rule}"] for rule in RULES},
}
RUNS["refreshes"] = [
    *RUNS["TSR-Adam"],
    *(f"--optimizer.tsr_{name}refresh_interval=1" for name in ("", "embedding_")),
]


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_training_step(
    arguments: list[str],
    unread_device: torch.device,
    one_rank: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if unread_device.type == "meta":
        # A trainer draws weights, which takes a device with values.
        with trainer_on("cpu", tmp_path, monkeypatch, *arguments) as trainer:
            _forget_values(trainer)
            _stub_what_reads(trainer, monkeypatch)
            _check_step(trainer, unread_device, monkeypatch)
    else:
        with trainer_on("cuda", tmp_path, monkeypatch, *arguments) as trainer:
            trainer.step = 2  # the first step is logged
            # TSR-Adam's first step refreshes all matrices.
            trainer.train_step(iter(micro_batches(trainer.model_args.vocab_size)))
            _check_step(trainer, unread_device, monkeypatch)


def _check_step(trainer: Trainer, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            with no_synchronization(device):
                return call(*args, **kwargs)

        return run

    owners: dict[str, Any] = {"backward": trainer, "apply": trainer, "decide": trainer_module}
    owners |= {"finish_sums": trainer.gradients, "clip": trainer.gradients}
    owners["read_next"] = trainer.reader
    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    trainer.step = 3
    trainer.train_step(iter(micro_batches(trainer.model_args.vocab_size)))
    # Here the step reads its own data too.
    assert calls == Counter([*owners, "read_next"])
    assert trainer.dataloader.microbatches == MICRO_BATCHES
    assert all(p.device.type == device.type for p in trainer.model_parts[0].parameters())


def _forget_values(trainer: Trainer) -> None:
    """Give a trainer model and optimizer on ``meta``, past TSR-Adam's first refresh."""
    config, dims = trainer.job_config, trainer.parallel_dims
    with torch.device("meta"):
        parallelize = trainer.train_spec.parallelize_fn
        model = parallelize(LlamaModel(trainer.model_args), dims, config)
    trainer.device, trainer.model_parts = torch.device("meta"), [model]
    trainer.optimizers = build_optimizers([model], config.optimizer, dims)
    trainer.lr_schedulers = trainer.train_spec.build_lr_schedulers_fn(
        trainer.optimizers, config.lr_scheduler, config.training.steps
    )
    trainer.build_step()
    if hasattr(trainer.optimizers, "gradients"):
        for optimizer in trainer.optimizers:
            optimizer.steps += 1
            for stack in optimizer.stacks:
                stack.refresh_counts += 1


def _stub_what_reads(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what reads by design, or `meta` lacks; without values it fails, as it must."""

    # What the host reads after the step.
    findings = Findings(False, 1.0, 0, False, (), loss_is_finite=True)
    monkeypatch.setattr(Verdict, "read", lambda verdict: findings)
    # The kernel is queued like any other; torch lists only devices with values for it.
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_, **__: None)
    # It has no generator.
    monkeypatch.setattr(
        stack, "draw_sketches", lambda keys, size, like: like.new_empty(len(keys), *size)
    )
