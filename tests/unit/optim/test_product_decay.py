# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weight decay of B A, against autograd's gradient of the penalty."""

from dataclasses import replace

import pytest
import torch

from tests.unit.optim.test_groups import steps, written
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.product_decay import ProductDecay
from torchtitan_lr.training import register

RATE, DECAY = 0.0625, 0.5  # of the first step of `steps`, which is warm-up
ROUNDING = {"atol": 5e-7, "rtol": 1e-5}  # of weights below 4 in fp32
PRODUCTS = "--optimizer.weight_decay_on=products"


def gradients(weights):
    """The gradient of the penalty by name, for the factors of every linear."""
    found = {}
    for name in [name for name in weights if name.endswith(".A.weight")]:
        other = name.replace(".A.", ".B.")
        A, B = (weights[factor].clone().requires_grad_() for factor in (name, other))
        (0.5 * (B @ A).square().sum()).backward()
        found |= {name: A.grad, other: B.grad}
    return found


@pytest.mark.parametrize("name", ["AdamW", "TSRAdam", "Muon"])  # LoRAMuon's step reads weights
def test_one_step_is_the_penaltys_gradient(name, tmp_path):
    options = [f"--optimizer.name={name}"]
    before, found, _ = steps(tmp_path / "on", *options, PRODUCTS)
    _, without, _ = steps(tmp_path / "off", *options, "--optimizer.weight_decay=0")
    penalty = gradients(before)
    assert len(penalty) == 14
    for parameter, weights in found.items():
        expected = torch.zeros_like(weights)
        if parameter in penalty:
            expected = -RATE * DECAY * penalty[parameter]
        elif weights.dim() == 2:
            expected = -RATE * DECAY * before[parameter]
        torch.testing.assert_close(weights - without[parameter], expected, **ROUNDING)


def test_an_optimizer_from_outside_that_builds_another_shrinks_once(tmp_path, monkeypatch):
    def build(model_parts, config, dims):
        return register.build_optimizers(model_parts, replace(config, name="AdamW"), dims)

    monkeypatch.setitem(register.FROM_OUTSIDE, "Adam", build)
    _, found, _ = steps(tmp_path / "outside", "--optimizer.name=Adam", PRODUCTS)
    _, same, _ = steps(tmp_path / "own", "--optimizer.name=AdamW", PRODUCTS)
    assert all(weights.equal(same[name]) for name, weights in found.items())


def test_each_factor_has_the_rates_of_its_group(tmp_path):
    tables = r"""
    [[optimizer.groups]]
    pattern = 'wq\.A'
    weight_decay_multiplier = 3
    [[optimizer.groups]]
    pattern = 'wq\.B'
    lr_multiplier = 2
    """
    before, found, _ = steps(tmp_path / "on", PRODUCTS, written(tmp_path, tables))
    off = ["--optimizer.weight_decay=0", written(tmp_path, tables)]
    _, without, _ = steps(tmp_path / "off", *off)
    penalty = gradients(before)
    for factor, times in (("wq.A", 3), ("wq.B", 2), ("wk.A", 1)):
        parameter = f"layers.0.attention.{factor}.weight"
        expected = -RATE * DECAY * times * penalty[parameter]
        change = found[parameter] - without[parameter]
        torch.testing.assert_close(change, expected, **ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rejected_step_changes_no_bit(dtype):
    torch.manual_seed(0)
    weights = {"x.A.weight": torch.randn(3, 8), "x.B.weight": torch.randn(5, 3)}
    weights = {name: torch.nn.Parameter(weight.to(dtype)) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE)
    decay = ProductDecay.of([optimizer], weights, dict.fromkeys(weights, DECAY))
    before = [weight.detach().clone() for weight in weights.values()]
    for found_inf, same in ((torch.ones(()), True), (torch.zeros(()), False)):
        optimizer.found_inf = found_inf
        decay.before([optimizer])
        after = [weight.detach() for weight in weights.values()]
        assert all(map(torch.equal, before, after)) == same


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--model.name=llama_full"], "optimizer.weight_decay_on: got 'products', expected 'mat"),
        (["--training.enable_cpu_offload"], "training.enable_cpu_offload: got True, expected fal"),
    ],
)
def test_what_no_run_can_have_is_refused(options, key, tmp_path):
    config = build_job_config([PRODUCTS, f"--job.dump_folder={tmp_path}", *options])
    with pytest.raises(ConfigError) as error:
        check_job_config(config, 4, "cuda", data="none")
    assert str(error.value).startswith(key)
