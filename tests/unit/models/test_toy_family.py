# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A family from outside the package is built, accepted, refused and counted like the others."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from tests.unit.tiny import build_tiny
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.tp_messages import FORMULAS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.titan.specs import REGISTERED_SPECS
from torchtitan_lr.training.register import register_model_family

NAMED = "--model.name=llama_tanh"
MODULE = "--experimental.custom_import=tests.toy_family"
TP = "--parallelism.tensor_parallel_degree=2"
NO_RUN = "--job.dump_folder=./outputs/no_run"  # whatever runs have left in ./outputs


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    yield
    sys.modules.pop("tests.toy_family", None)
    for name in ("tanh", "dense2", "lax2"):
        FAMILIES.pop(name, None)
        FLAVORS.pop(name, None)
        REGISTERED_SPECS.pop(f"llama_{name}", None)


def config_of(*arguments):
    config = build_job_config([NAMED, MODULE, TP, NO_RUN, *arguments])
    check_job_config(config, 4, "cpu")
    return config


def tiny_toy(**changes):
    importlib.import_module("tests.toy_family")
    return build_tiny("tanh", activation="fullrank", **changes)


def test_a_linear_is_b_tanh_a():
    model = tiny_toy(dtype=torch.float64)
    attention, norm = model.layers["1"].attention, model.layers["1"].attention_norm
    linears = [attention.wq, attention.wk, attention.wv]
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    outputs, _ = attention.qkv(x, linears, norm)
    for linear, out in zip(linears, outputs, strict=True):
        torch.testing.assert_close(out, linear.B(torch.tanh(linear.A(norm(x)))))


@pytest.mark.parametrize("plan", ["auto", "vanilla"])
def test_a_run_of_it_is_accepted_and_estimated(plan):
    run = read_run(config_of(f"--parallelism.tp_plan={plan}"), 4)
    assert run.args.family == "tanh" and run.args.rank_ffn == FLAVORS["cola"]["debug"].rank_ffn
    assert run.settings.plan == plan.replace("auto", "btp")


@pytest.mark.parametrize(
    ("family", "like"),
    [
        (ModelFamily("dense2", low_rank=False), "full"),
        (ModelFamily("lax2", carries_latents=True, gated=True), "lax"),
    ],
    ids=["dense", "gated"],
)
def test_formulas_ask_what_holds_for_a_family_and_not_its_name(family, like):
    register_model_family(family)
    args = replace(FLAVORS[family.name]["debug"], lax_gate="scalar" if family.gated else "identity")
    settings = TPSettings("btp" if args.low_rank else "megatron", comm="sequence")
    formula = FORMULAS[settings.plan]
    named_like = formula(replace(args, family=like), settings, 64, 2)
    assert formula(args, settings, 64, 2) == named_like
    assert bool(named_like.get("gates")) == family.gated


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("import nothing_of_this_name", "that can be imported .*nothing_of_this_name"),
        ("1 / 0", r"that runs \(ZeroDivisionError: division by zero, .*own_file.py:1\)"),
    ],
)
def test_a_module_of_the_working_directory_is_found_and_its_faults_are_told(
    code, want, tmp_path, monkeypatch
):
    (tmp_path / "own_file.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=want):
        build_job_config(["--experimental.custom_import=own_file"])
