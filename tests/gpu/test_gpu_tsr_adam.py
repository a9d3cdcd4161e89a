# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam's refreshes and plain steps on any device against the plain reference in fp64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.trainers import trainer_on
from tests.reference import tsr_adam as reference
from tests.unit.tiny import tiny_args
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.spectral.optimizer import may_round
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices
from torchtitan_lr.optim.tsr.svd import draw_sketches

STEPS = 5
HYPER = reference.Hyper(lr=0.02, eps=1e-3, weight_decay=0.1, scale=0.75)
MAX_NORM = 1.0

BASE = TSRSettings(rank=4, embedding_rank=4, refresh_interval=2, scale=HYPER.scale)
SETTINGS = {
    "rotate": replace(BASE, moments="rotate", compress_head=True),
    "keep, one side": replace(BASE, moments="keep", projection="one_sided"),
    "staggered": replace(BASE, stagger=True),
}


TSR = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=8"]


def small_model() -> LlamaModel:
    model = LlamaModel(tiny_args("full", n_layers=1, dim=16, ffn_dim=24, vocab_size=32))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def gradients(names: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Gradients, numbers of fp32; singular values fall by halves, so that none are close."""
    generator = torch.Generator().manual_seed(step)

    def one(shape: torch.Size) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if noise.dim() == 1:
            return noise
        left, _, right = torch.linalg.svd(noise, full_matrices=False)
        return left * 2.0 ** -torch.arange(left.shape[1]) @ right

    return {name: one(value.shape).float().double() for name, value in names.items()}


def by_reference(
    weights: dict[str, Tensor],
    settings: TSRSettings,
    dtype: torch.dtype,
    scale: float = HYPER.scale,
) -> dict[str, Tensor]:
    weights = {name: value.to(dtype, copy=True) for name, value in weights.items()}
    plans = plan_matrices({name: tuple(value.shape) for name, value in weights.items()}, settings)
    hyper = replace(HYPER, scale=scale)
    twin = reference.ReferenceTSR(weights, plans, settings, hyper, MAX_NORM)
    for step in range(STEPS):
        twin.step({name: g.to(dtype) for name, g in gradients(weights, step).items()})
    return weights


def by_optimizer(model: LlamaModel, settings: TSRSettings, device: torch.device) -> None:
    optimizer = TSRAdam(model.named_parameters(), settings, **HYPER.defaults())
    named = dict(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.begin()
        with optimizer.micro_batch(last=True):
            for name, gradient in gradients(named, step).items():
                named[name].grad = gradient.to(device, named[name].dtype)
        optimizer.clip(MAX_NORM, optimizer.finish_sums().sqrt())
        optimizer.step()


def distance(a: dict[str, Tensor], b: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The largest |a - b| / |b - start| of a parameter."""
    return max(
        float((a[n].cpu().double() - b[n]).norm() / (b[n] - start[n].double()).norm()) for n in b
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps(
    settings: TSRSettings, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn_there(keys, size, like):
        # A device has random numbers of its own: the reference is given the same ones.
        there = torch.empty(0, dtype=dtype, device=device)
        return draw_sketches(keys, size, there).to("cpu", like.dtype)

    monkeypatch.setattr(reference, "draw_sketches", drawn_there)
    model = small_model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    exact = by_reference(start, settings, torch.float64)
    model.to(device, dtype)
    by_optimizer(model, settings, device)
    found = {name: p.detach() for name, p in model.named_parameters()}
    limit = 1e-10  # fp64's rounding, 1e-16, amplified by five steps of matrices at most 32 wide
    if dtype == torch.float32:
        # The reference in fp32 shows what rounding does. A GPU's kernels add in another order and
        # iterate its SVD otherwise: thirty times that.
        limit = 30 * distance(by_reference(start, settings, dtype), exact, start)
    assert all(p.device.type == device.type and p.dtype == dtype for p in found.values())
    assert distance(found, exact, start) <= limit
    assert limit < 0.1 * distance(by_reference(start, settings, torch.float64, 0.7), exact, start)


@pytest.mark.parametrize(
    ("options", "compute"),
    [(TSR, "bfloat16"), (["--optimizer.name=Muon"], "bfloat16"), (TSR, "float32")],
    ids=["TSR-Adam", "Muon", "TSR-Adam, fp32"],
)
def test_precision_of_products(
    options: list[str],
    compute: str,
    device: torch.device,
    one_rank: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = [*options, f"--training.mixed_precision_param={compute}"]
    with trainer_on(device.type, tmp_path, monkeypatch, *options):
        rounded = device.type == "cuda" and compute == "bfloat16"
        assert torch.get_float32_matmul_precision() == ("high" if rounded else "highest")
        assert may_round(device) is rounded
