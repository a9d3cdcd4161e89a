# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The race's variants of TSR-Adam against their equations, and what its methods refuse."""

import math

import pytest
import torch
from torch import nn

from scripts.research.race.diloco import fragments_of
from scripts.research.race.tsr_variants import with_feedback, with_polar_factors
from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings


def optimizer_of(change):
    torch.manual_seed(0)
    model = nn.ModuleDict({"w": nn.Linear(24, 16, bias=False)}).double()
    settings = TSRSettings(rank=4, refresh_interval=3)
    optimizer = TSRAdam(model.named_parameters(), settings, lr=0.01)
    change(optimizer)
    return model["w"].weight, optimizer


def gradients(steps=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 24, generator=generator, dtype=torch.float64) for _ in range(steps)]


def test_feedback_loses_nothing():
    """All gradients together are what the cores sent, lifted, and the last residual."""
    weight, optimizer = optimizer_of(with_feedback)
    (stack,) = optimizer.stacks
    sent = torch.zeros_like(weight)
    for gradient in gradients():
        optimizer.begin()
        with optimizer.micro_batch(last=True):
            weight.grad = gradient.clone()
            optimizer.gradient_arrived(weight)
        optimizer.finish_sums()
        optimizer.step()  # which turns the bases before they are used
        lifted = stack.U[0] @ stack.C[0] @ stack.V[0].mT
        sent += lifted.mT if stack.plan.transposed else lifted
    owed = stack.residuals[0].mT if stack.plan.transposed else stack.residuals[0]
    torch.testing.assert_close(sent + owed, sum(gradients()), rtol=0, atol=1e-12)
    assert owed.norm() > sent.norm() / 10  # the residual is no rounding error


def test_polar_factors_have_the_size_of_adams_directions():
    weight, optimizer = optimizer_of(with_polar_factors)
    (stack,) = optimizer.stacks
    before = weight.detach().clone()
    weight.grad = gradients()[0]
    optimizer.step()
    values = torch.linalg.svdvals((before - weight.detach()) / (0.01 * 0.75))
    assert values[:4].numpy() / math.sqrt(4) == pytest.approx([0.95] * 4, abs=0.3)
    assert values[4] < 1e-12
    assert not stack.exp_avg_sq.any()


def check(name, options, world=2):
    """Check a run on so many replicas, unless the options say otherwise."""
    file = ROOT / "train_configs" / "debug_small.toml"
    common = [
        *("experimental.custom_import=scripts.research.race.rivals", f"optimizer.name={name}"),
        *("optimizer.tsr_rank=12", "optimizer.tsr_embedding_rank=12", "model.name=llama_full"),
        *(f"{REPLICATE}={world}", "training.local_batch_size=4"),
        f"training.global_batch_size={4 * world}",
    ]
    arguments = [f"job.config_file={file}", *common, *options]
    config = build_job_config([f"--{argument}" for argument in arguments])
    check_job_config(config, world, "cpu", on_paper=True, data="none")


WITHOUT = "checkpoint.no_enable"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SKIPS = "training.max_skipped_steps=1"
BF16 = "training.mixed_precision_reduce=bfloat16"
PIPELINE = "parallelism.pipeline_parallel_degree=2"
ONE_SIDED = "optimizer.tsr_projection=one_sided"

REFUSED = [
    *((name, [f"{REPLICATE}=1"], REPLICATE) for name in ("PowerSGD-4", "DiLoCo-16")),
    *((name, [f"{REPLICATE}=1"], REPLICATE) for name in ("StreamingDiLoCo-64", "TSR-feedback")),
    *((name, [f"{REPLICATE}=1", PIPELINE], REPLICATE) for name in ("PowerSGD-2", "DiLoCo-64")),
    ("DiLoCo-16", [WITHOUT, BF16], "training.mixed_precision_reduce"),
    ("PowerSGD-4", [BF16], "training.mixed_precision_reduce"),
    ("PowerSGD-4", [SKIPS], "training.max_skipped_steps"),
    ("TSR-feedback", [SKIPS], "training.max_skipped_steps"),
    ("TSR-feedback", [ONE_SIDED], "optimizer.tsr_projection"),
    ("TSR-Muon", [ONE_SIDED], "optimizer.tsr_projection"),
    ("TSR-feedback", ["training.global_batch_size=16"], "training.global_batch_size"),
    ("DiLoCo-16", [], "checkpoint.enable"),
    ("StreamingDiLoCo-16", [WITHOUT, "model.flavor=tiny"], "model.flavor"),
]


@pytest.mark.parametrize(("name", "options", "key"), REFUSED)
def test_what_a_method_does_not_fit_is_refused_in_one_line(name, options, key):
    with pytest.raises(ConfigError) as error:
        check(name, options)
    text = str(error.value)
    assert text.startswith(f"{key}: got ") and "\n" not in text
    assert f"with optimizer.name = {name!r}" in text


def test_a_lone_rank_has_no_replicas_to_exchange_with():
    for name in ("PowerSGD-4", "DiLoCo-16"):
        with pytest.raises(ConfigError, match=r"ranks \(1\), which must be at least 2"):
            check(name, [WITHOUT], world=1)
    check("TSR-feedback", [], world=1)


ACCEPTED = [
    ("PowerSGD-4", ["training.global_batch_size=32"]),
    ("DiLoCo-16", [WITHOUT, SKIPS, "model.flavor=tiny"]),
    ("StreamingDiLoCo-16", [WITHOUT]),
    ("TSR-feedback", [BF16, "training.global_batch_size=-1"]),
    ("TSR-Muon", [BF16, SKIPS, f"{REPLICATE}=1", "training.global_batch_size=16"]),
    ("TSRAdam", [ONE_SIDED, BF16]),
    ("AdamW", [BF16, SKIPS]),
]


@pytest.mark.parametrize(("name", "options"), ACCEPTED)
def test_what_a_method_fits_is_not_refused(name, options):
    check(name, options, world=4)


@pytest.mark.parametrize("blocks", range(4, 14))
def test_fragments_are_as_many_as_asked_and_hold_a_model_once(blocks):
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(1, 1) for i in range(blocks)})
    model.tok_embeddings, model.norm, model.output = (nn.Linear(1, 1) for _ in range(3))
    fragments = fragments_of(model, 4)
    in_order = [model.tok_embeddings, *model.layers.values(), model.norm, model.output]
    assert [part for fragment in fragments for part in fragment] == in_order
    sizes = [sum(part in model.layers.values() for part in fragment) for fragment in fragments]
    assert len(sizes) == 4 and max(sizes) - min(sizes) <= 1
