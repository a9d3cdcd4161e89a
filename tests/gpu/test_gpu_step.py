# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One step of the trainer on any device against the same step by hand, in fp64 on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.trainers import IGNORED, micro_batches, trainer_on
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.training import trainer as trainer_module
from torchtitan_lr.training.trainer import Batch, Trainer

MAX_NORM = 0.1


def by_hand(
    trainer: Trainer, batches: list[Batch], dtype: torch.dtype, clip: bool = True
) -> dict[str, Tensor]:
    """Loss, gradient norm and parameters after a first step, by the formulas."""
    model = LlamaModel(trainer.model_args)
    model.load_state_dict(trainer.model_parts[0].state_dict())
    model.to(dtype)
    valid = [labels != IGNORED for _, labels in batches]
    loss = torch.zeros((), dtype=dtype)
    for (inputs, labels), counts in zip(batches, valid, strict=True):
        log_p = model(inputs["input"]).log_softmax(-1)
        of_labels = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = loss - of_labels[counts].sum() / sum(mask.sum() for mask in valid)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    factor = min(1.0, MAX_NORM / (norm.item() + 1e-6)) if clip else 1.0
    found = {"loss": loss.detach(), "norm": norm}
    group = trainer.optimizers.optimizers[0].param_groups[0]
    lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
    for name, parameter in model.named_parameters():
        g = factor * gradients[name]
        # After one step m̂ = g and v̂ = g².
        weight = parameter.detach()
        found[name] = weight - lr * (decay * weight + g / (g.abs() + eps))
    return found


def by_trainer(
    trainer: Trainer, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    found = {}

    decide = trainer_module.decide

    def remembered(loss: Tensor, *others: Any, **named: Any) -> Any:
        verdict = decide(loss, *others, **named)
        found.update(loss=loss.cpu(), norm=verdict.norm.cpu())
        return verdict

    monkeypatch.setattr(trainer_module, "decide", remembered)
    trainer.step = 2  # the first is logged
    trainer.train_step(iter(batches))
    (model,) = trainer.model_parts
    return found | {name: p.detach().cpu() for name, p in model.named_parameters()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The largest |a - b| of what the step gave, over what it should have changed."""
    assert a.keys() == b.keys()
    changes = {name: b[name] - start.get(name, torch.zeros(())).double() for name in b}
    return max(float((a[n].double() - b[n]).norm() / changes[n].norm()) for n in b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_one_step(
    dtype: torch.dtype,
    device: torch.device,
    one_rank: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trainer_on(device.type, tmp_path, monkeypatch) as trainer:
        (model,) = trainer.model_parts
        assert next(model.parameters()).device.type == device.type
        batches = micro_batches(trainer.model_args.vocab_size)
        start = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        exact = by_hand(trainer, batches, torch.float64)
        unclipped = distance(by_hand(trainer, batches, torch.float64, clip=False), exact, start)
        # fp64: its rounding, 1e-16, amplified by two blocks, a loss and a quotient g / (|g| + ε).
        limit = 1e-10
        if dtype == torch.float32:
            # The step by hand in fp32 shows what rounding does; other kernels add in other orders.
            limit = 30 * distance(by_hand(trainer, batches, dtype), exact, start)
        model.to(dtype)  # after the optimizer was built, which keeps the parameters
        for state in trainer.optimizers.optimizers[0].state.values():
            state.update({key: x.to(dtype) for key, x in state.items() if key != "step"})
        found = by_trainer(trainer, batches, monkeypatch)
    assert found["tok_embeddings.weight"].dtype == dtype
    assert distance(found, exact, start) <= limit
    assert limit < 0.1 * unclipped
