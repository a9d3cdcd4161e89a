# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank checkpointing on any device: gradients, what stays alive, what runs again."""

import pytest
import torch
from torch import Tensor

from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.recompute import (
    apply_low_rank_checkpoint,
)

BATCH, SEQ, BLOCKS, HEADS = 2, 32, 3, 4


def gradients(model: LlamaModel, device: torch.device) -> dict[str, Tensor]:
    batch = tokens(model.model_args, BATCH, SEQ).to(device)
    model(batch).square().sum().backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("save_attention", [False, True])
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_gradients(family: str, save_attention: bool, device: torch.device) -> None:
    expected = gradients(build_tiny(family, torch.float64), torch.device("cpu"))
    model = build_tiny(family, torch.float64).to(device)
    apply_low_rank_checkpoint(model, save_attention)
    found = gradients(model, device)
    assert len(found) == len(expected) == len(list(model.parameters()))
    for name, value in found.items():
        plain = expected[name.replace("_checkpoint_wrapped_module.", "")]
        # fp64's rounding, 1e-16, amplified by three blocks whose sums have at most 96 terms.
        assert (value - plain).norm() <= 1e-11 * plain.norm(), name
