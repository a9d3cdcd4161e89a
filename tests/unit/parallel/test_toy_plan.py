# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A plan from outside the package is accepted, refused, estimated and compared like the others."""

import sys
from math import prod

import pytest

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.step_traffic import step_traffic
from torchtitan_lr.costs.tp_messages import FORMULAS, model_traffic
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.plans import PLANS

DEBUG = "train_configs/debug_cola.toml"
NAMED = "--parallelism.tp_plan=gathered"
MODULE = "--experimental.custom_import=tests.toy_plan"
TP = "--parallelism.tensor_parallel_degree=2"
NO_RUN = "--job.dump_folder=./outputs/no_run"  # whatever runs have left in ./outputs


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    yield
    sys.modules.pop("tests.toy_plan", None)
    for registry in (PLANS, FORMULAS):
        registry.pop("gathered", None)
    if "gathered" in TP_PLANS:
        TP_PLANS.remove("gathered")


def config_of(*arguments):
    common = [f"--job.config_file={DEBUG}", NAMED, MODULE, TP, NO_RUN]
    config = build_job_config([*common, *arguments])
    check_job_config(config, 4, "cpu")
    return config


def test_a_registered_plan_is_accepted_from_a_toml_too(tmp_path):
    assert config_of().parallelism.tp_plan == "gathered"
    toml = tmp_path / "toy.toml"
    toml.write_text(
        '[parallelism]\ntp_plan = "gathered"\n[experimental]\ncustom_import = "tests.toy_plan"\n'
    )
    assert build_job_config([f"--job.config_file={toml}"]).parallelism.tp_plan == "gathered"
    with pytest.raises(ConfigError, match=r"'caat', 'gathered'$"):
        build_job_config(["--parallelism.tp_plan=no_such_plan"])


def test_the_estimate_counts_it():
    run = read_run(config_of("--training.global_batch_size=-1"), 4)
    sent = [row for row in step_traffic(run, 0) if row.mesh_dim == "tp"]
    assert sent == model_traffic(run.args, run.settings, 2, run.tokens)
    gathers = [row for row in sent if row.scope == "block 0"]
    assert [(row.op, row.calls) for row in gathers] == [("all_gather", 14)]
    shapes = run.stages[0]["block 0"].values()
    assert gathers[0].elements == run.tp * sum(prod(size) for size in shapes if len(size) == 2)
