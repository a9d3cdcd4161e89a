# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A family and a plan from outside the package: their module, their names, what is refused.

Their runs are in tests/distributed/test_toy_plan.
"""

import importlib
import sys

import pytest
import torch

from tests.unit.tiny import build_tiny
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.costs.tp_messages import FORMULAS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plans import PLANS
from torchtitan_lr.titan.specs import REGISTERED_SPECS


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    yield
    for module in ("tests.toy_family", "tests.toy_plan"):
        sys.modules.pop(module, None)
    FAMILIES.pop("tanh", None)
    FLAVORS.pop("tanh", None)
    REGISTERED_SPECS.pop("llama_tanh", None)
    for registry in (PLANS, FORMULAS):
        registry.pop("gathered", None)
    if "gathered" in TP_PLANS:
        TP_PLANS.remove("gathered")


def test_a_linear_is_b_tanh_a():
    importlib.import_module("tests.toy_family")
    model = build_tiny("tanh", torch.float64, activation="fullrank")
    attention, norm = model.layers["1"].attention, model.layers["1"].attention_norm
    linears = [attention.wq, attention.wk, attention.wv]
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    outputs, _ = attention.qkv(x, linears, norm)
    for linear, out in zip(linears, outputs, strict=True):
        torch.testing.assert_close(out, linear.B(torch.tanh(linear.A(norm(x)))))


def test_a_toml_may_name_a_plan_of_its_module(tmp_path):
    toml = tmp_path / "toy.toml"
    toml.write_text(
        '[parallelism]\ntp_plan = "gathered"\n[experimental]\ncustom_import = "tests.toy_plan"\n'
    )
    assert build_job_config([f"--job.config_file={toml}"]).parallelism.tp_plan == "gathered"
    with pytest.raises(ConfigError, match=r"'caat', 'gathered'$"):
        build_job_config(["--parallelism.tp_plan=no_such_plan"])


def test_a_module_of_the_working_directory_is_found_and_its_imports_are_told(tmp_path, monkeypatch):
    (tmp_path / "own_file.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=r"can be imported .*nothing_of_this_name"):
        build_job_config(["--experimental.custom_import=own_file"])
