# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What crosses stage boundaries, in closed form; and the loss that a pipeline divides."""

from math import prod

import pytest
import torch

from tests.unit.tiny import tiny_args
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import stage_boundary
from torchtitan_lr.parallel.stages import Pipeline

# width 48, ranks 12 (q, k, v, o) and 20 (gate, up, down)
LATENTS = 4 * 12 + 3 * 20


@pytest.mark.parametrize(
    ("family", "settings", "degree", "per_token"),
    [
        ("cola", TPSettings("btp"), 1, 48),
        ("lax", TPSettings("btp"), 1, 48 + LATENTS),
        ("svd", TPSettings("btp"), 4, 48 / 4),
        ("lax", TPSettings("btp"), 4, 48 / 4 + LATENTS),
        ("lax", TPSettings("btp", comm="sequence"), 4, (48 + LATENTS) / 4),
        ("lax", TPSettings("vanilla"), 4, 48 + LATENTS / 4),
        ("lax", TPSettings("vanilla_replicated"), 2, 48 + LATENTS / 2),
        ("full", TPSettings("megatron"), 4, 48),
        ("full", TPSettings("megatron", comm="sequence"), 4, 48 / 4),
    ],
)
def test_elements_a_token(family, settings, degree, per_token):
    boundary = stage_boundary(tiny_args(family), settings, degree, 16, latents=True)
    assert prod(boundary.shape) == 16 * per_token


def test_the_loss_is_divided_before_backward():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (2, 5))
    pipeline = Pipeline(None, None, None, None, cross_entropy_sum, torch.tensor(10.0))
    pipeline.loss(logits, labels).backward()
    divided = logits.grad.clone()
    logits.grad = None
    cross_entropy_sum(logits, labels).backward()
    torch.testing.assert_close(divided, logits.grad / 10, rtol=1e-12, atol=1e-12)
