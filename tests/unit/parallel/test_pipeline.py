# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What crosses stage boundaries, in closed form; and the loss that a pipeline divides."""

from math import prod
from types import SimpleNamespace

import pytest
import torch

from tests.oracle.pipeline import boundary_elements
from tests.unit.tiny import tiny_args
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.tp_messages import FORMULAS, PlanFormula
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.parallel.plan_parts import COLUMN_ROW, WHOLE, Plan, TPSettings
from torchtitan_lr.parallel.plans import PLANS, Boundary, stage_boundary
from torchtitan_lr.parallel.stage_split import layers_before_boundaries
from torchtitan_lr.parallel.stages import Pipeline, stage_boundaries

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
    assert boundary_elements(tiny_args(family), settings, degree, 16, 1) == 16 * per_token


def test_latents_of_a_part_that_is_not_split(monkeypatch):
    nothing = lambda *_: {}  # noqa: E731
    monkeypatch.setitem(PLANS, "mixed", Plan(nothing, WHOLE, COLUMN_ROW))
    monkeypatch.setitem(FORMULAS, "mixed", PlanFormula(nothing, (None, None), (0, 1)))
    boundary = stage_boundary(tiny_args("lax"), TPSettings("mixed"), 4, 16, latents=True)
    assert boundary.latents == (12, 12, 12, 12, 5, 5, 5)
    elements = boundary_elements(tiny_args("lax"), TPSettings("mixed"), 4, 16, 1)
    assert elements == prod(boundary.shape) == 16 * (48 + 4 * 12 + 3 * 5)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_stage_sends_the_streams_of_its_lanes(degree):
    args = tiny_args("full", lanes=4, sync_fraction=0.5)
    boundary = stage_boundary(args, TPSettings("caat"), degree, 16, latents=True)
    assert boundary == Boundary(16, 4 // degree * 48, (), lanes=4 // degree)
    assert boundary_elements(args, TPSettings("caat"), degree, 16, 1) == prod(boundary.shape)


def test_latents_cross_between_blocks_only():
    names = [["tok_embeddings"], ["layers.0", "layers.1"], ["layers.2"], ["norm", "output"]]
    section = SimpleNamespace(tensor_parallel_degree=1, module_fqns_per_model_part=names)
    config = SimpleNamespace(parallelism=section)
    boundaries = stage_boundaries(config, tiny_args("lax"), 16, TPSettings())
    assert [sum(boundary.latents) for boundary in boundaries] == [0, LATENTS, 0]
    elements = [
        boundary_elements(tiny_args("lax"), TPSettings(), 1, 16, before)
        for before in layers_before_boundaries(config, 3)
    ]
    assert elements == [prod(boundary.shape) for boundary in boundaries]


def test_rows_whose_tokens_the_ranks_cannot_share_have_boundaries_too():
    options = ["tensor_parallel_degree=2", "tp_comm=sequence", "pipeline_parallel_degree=2"]
    config = build_job_config(
        [*(f"--parallelism.{option}" for option in options), "--training.seq_len=15"]
    )
    pipeline = Pipeline(config, tiny_args("cola"), None, None, cross_entropy_sum)
    assert [len(pipeline.boundaries(seq_len)) for seq_len in (15, 15, 16)] == [1, 1, 1]


def test_the_loss_is_divided_before_backward():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (2, 5))
    pipeline = Pipeline(None, None, None, None, cross_entropy_sum, torch.tensor(10.0))
    pipeline.loss(logits, labels).backward()
    divided = logits.grad.clone()
    logits.grad = None
    cross_entropy_sum(logits, labels).backward()
    torch.testing.assert_close(divided, logits.grad / 10, rtol=1e-12, atol=1e-12)
