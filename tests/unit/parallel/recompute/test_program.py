# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Passes that follow a recording: exact, not recorded, and recorded again where they differ."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.unit.parallel.recompute.test_activations import build, largest_difference
from torchtitan_lr.models.marks import keep
from torchtitan_lr.parallel.recompute import low_rank_checkpoint
from torchtitan_lr.parallel.recompute.low_rank_checkpoint import (
    apply_low_rank_checkpoint,
    checkpoint_block,
)
from torchtitan_lr.parallel.recompute.program import Program, Programs

NO_RECORDING = patch.object(low_rank_checkpoint, "Recording", side_effect=AssertionError)


def run(model: nn.Module, seed: int = 0, batch: int = 2) -> list[torch.Tensor]:
    """Return the loss and all gradients of a batch."""
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randint(96, (batch, 32), generator=generator)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("save_attention", [False, True])
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_later_passes(family: str, save_attention: bool) -> None:
    plain = build(family).double()
    checkpointed = copy.deepcopy(plain)
    apply_low_rank_checkpoint(checkpointed, save_attention)
    run(checkpointed)
    with NO_RECORDING:
        for seed in (1, 2):
            expected = run(plain, seed)
            assert largest_difference(run(checkpointed, seed), expected) == 0
            with torch.no_grad():  # as an optimizer does
                for model in (plain, checkpointed):
                    for p in model.parameters():
                        p.sub_(0.01 * p.grad)
    # The control: another batch size is another form.
    with NO_RECORDING, pytest.raises(AssertionError):
        run(checkpointed, batch=1)
    assert largest_difference(run(checkpointed, 3, 1), run(plain, 3, 1)) == 0


def test_two_passes_before_backward() -> None:
    """As pipelines run them."""
    plain = build().double()
    checkpointed = copy.deepcopy(plain)
    apply_low_rank_checkpoint(checkpointed, False)
    run(checkpointed)
    tokens = torch.arange(128).view(2, 2, 32) % 96
    gradients = []
    for model in (plain, checkpointed):
        model.zero_grad()
        losses = [model(part).square().sum() for part in tokens]
        for loss in losses:
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert largest_difference(*gradients) == 0


def test_other_tensors_are_saved() -> None:
    """A frozen weight changes what autograd saves; the pass is then recorded again."""
    plain = build().double()
    checkpointed = copy.deepcopy(plain)
    apply_low_rank_checkpoint(checkpointed, False)
    run(checkpointed)
    for model in (plain, checkpointed):
        for p in model.layers["1"].attention.wo.parameters():
            p.requires_grad_(False)
    with NO_RECORDING, pytest.raises(AssertionError):
        run(checkpointed)
    for _ in range(2):
        assert largest_difference(run(checkpointed), run(plain)) == 0


def test_a_kernel_chosen_in_forward_alone() -> None:
    """Operators are repeated, not the choice between them."""
    model = build().double()
    apply_low_rank_checkpoint(model, False)
    gradients = []
    for inside in (True, True, False):
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(torch.zeros(2, 32, dtype=torch.long)).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert largest_difference(gradients[2], gradients[0]) == 0


class Bottleneck(nn.Module):
    """One marked product between two others, and something else."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.extra(self.b(keep(self.a(x)))).sin()
        return out


STRANGER = torch.ones(8)


@pytest.mark.parametrize(
    ("extra", "followed"),
    [
        (lambda x: x.add_(1.0).cos(), True),
        (lambda x: torch.cat([x[..., :4], 2 * x[..., 4:]], -1), True),
        (lambda x: torch.rand_like(x) * x.exp(), False),
        (lambda x: (x * STRANGER).exp(), False),
    ],
    ids=["in place", "lists", "random", "a tensor from elsewhere"],
)
def test_what_can_be_followed(extra: Any, followed: bool) -> None:
    block = Bottleneck(extra)
    programs = Programs(block)
    settings = {"save_attention": False, "save_attention_compiled": False}
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for step in range(3):
        gradients = []
        for checkpointed in (False, True):
            torch.manual_seed(step)
            block.zero_grad()
            x.grad = None
            if checkpointed:
                out = checkpoint_block(block, x, programs=programs, **settings)
            else:
                out = block(x)
            torch.manual_seed(step)
            out.sum().backward()
            gradients.append([x.grad, *(p.grad.clone() for p in block.parameters())])
        assert largest_difference(*gradients) == 0
    (program,) = programs.found.values()
    assert isinstance(program, Program) is followed
