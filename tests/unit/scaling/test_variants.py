# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.variants import COMPARED_PLANS, derive, shared_mode

TP = "--parallelism.tensor_parallel_degree=2"
NO_RUN = "--job.dump_folder=./outputs/no_run"  # whatever runs have left in ./outputs


@pytest.mark.parametrize("plan", COMPARED_PLANS)
@pytest.mark.parametrize("family", ["full", "svd", "cola", "lax", "caat"])
def test_every_plan_from_every_family(family, plan):
    config = f"train_configs/debug_{family}.toml"
    options = [f"--job.config_file={config}", TP, NO_RUN]
    derived = build_job_config([*options, *derive(config, plan, [TP])])
    check_job_config(derived, 4, "cpu")
    given = "cola" if family in ("full", "caat") else family
    assert derived.model.name == ("llama_full" if plan == "full" else f"llama_{given}")
    assert derived.parallelism.tp_plan == ("auto" if plan == "full" else plan)
    assert derived.caat.lanes == 1


def test_choices_of_the_bottleneck_aware_plan_do_not_reach_the_others():
    config = "train_configs/debug_cola.toml"
    choices = [
        *("--parallelism.tp_norm=sync", "--parallelism.tp_head=scatter", "--low_rank.rank=16"),
        *("--parallelism.no_tp_grouping", "--activation_checkpoint.mode=low_rank"),
        *("--parallelism.context_parallel_degree=2", "--parallelism.cp_gather=latents"),
    ]
    for plan in COMPARED_PLANS:
        arguments = [f"--job.config_file={config}", NO_RUN, *choices]
        mode = shared_mode("low_rank", [plan])
        changes = [*derive(config, plan, choices), f"--activation_checkpoint.mode={mode}"]
        derived = build_job_config([*arguments, *changes])
        check_job_config(derived, 4, "cpu")
        assert derived.parallelism.tp_norm == ("sync" if plan == "btp" else "online")
        assert derived.parallelism.cp_gather == ("latents" if plan == "btp" else "kv")
    # The control: without the derivation the same choices are refused.
    plain = build_job_config([*arguments, "--parallelism.tp_plan=vanilla"])
    with pytest.raises(ConfigError, match="tp_norm"):
        check_job_config(plain, 4, "cpu")
