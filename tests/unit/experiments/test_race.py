# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the race's methods refuse."""

import pytest

from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError


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
BF16 = "training.mixed_precision_reduce=bfloat16"

REFUSED = [
    *((name, [f"{REPLICATE}=1"], REPLICATE) for name in ("PowerSGD-4", "DiLoCo-16")),
    ("DiLoCo-16", [WITHOUT, BF16], "training.mixed_precision_reduce"),
    ("PowerSGD-4", [BF16], "training.mixed_precision_reduce"),
    ("DiLoCo-16", [], "checkpoint.enable"),
    ("StreamingDiLoCo-16", [WITHOUT, "model.flavor=tiny"], "model.flavor"),
]


@pytest.mark.parametrize(("name", "options", "key"), REFUSED)
def test_what_a_method_does_not_fit_is_refused_in_one_line(name, options, key):
    with pytest.raises(ConfigError) as error:
        check(name, options)
    text = str(error.value)
    assert text.startswith(f"{key}: got ") and "\n" not in text
    assert name in text
