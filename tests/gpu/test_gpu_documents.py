# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Documents kept apart on any device, against each of them alone in fp64 on the CPU."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.gpu.trainers import no_synchronization
from tests.support.documents import alone, difference, masks_of_blocks, together
from tests.unit.tiny import build_tiny
from torchtitan_lr.models.llama import BLOCK_MASK_DEVICES, separate
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint

LIMIT = 1e-3
"""Of |error| / |expected|: fp32's rounding, 6e-8, amplified by three blocks; a row that is one
document gives errors above .01."""

WIDE = {"dim": 128, "ffn_dim": 160}
"""Heads of 32 channels: torch's kernel takes no fewer than 16."""


@pytest.fixture(autouse=True)
def _blocks(device: torch.device) -> Iterator[None]:
    with nullcontext() if device.type in BLOCK_MASK_DEVICES else masks_of_blocks():
        yield


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("how", ["plain", "attention saved", "attention repeated"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_documents(kv_heads: int, how: str, device: torch.device) -> None:
    expected = alone(build_tiny("cola", torch.float64, n_kv_heads=kv_heads, **WIDE))
    model = build_tiny("cola", torch.float64, n_kv_heads=kv_heads, **WIDE).float().to(device)
    if how != "plain":
        apply_low_rank_checkpoint(model, how == "attention saved")
    assert difference(on_cpu(together(model)), expected) < LIMIT
    one = on_cpu(together(model, change=torch.zeros_like))
    assert difference(one, expected) > 10 * LIMIT


def on_cpu(found: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, gradients = found
    return loss.cpu().double(), {name: g.cpu().double() for name, g in gradients.items()}


def test_no_memory_of_the_scores_and_no_wait(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU adds a mask to all scores")
    documents = torch.arange(64, device=device).repeat_interleave(128)[None]  # of 8,192 tokens
    separate(documents, torch.bfloat16)  # compiles
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with no_synchronization(device):
        _, mask = separate(documents, torch.bfloat16)
    assert mask is not None
    # The scores of a row in one bit each would take as much.
    assert torch.cuda.max_memory_allocated(device) - before < 8192**2 / 8
