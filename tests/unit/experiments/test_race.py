# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the race's methods refuse."""

import pytest

from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

REPLICATE = "parallelism.data_parallel_replicate_degree"
BF16 = "training.mixed_precision_reduce=bfloat16"


@pytest.mark.parametrize(
    ("name", "option", "key"),
    [
        ("PowerSGD-4", f"{REPLICATE}=1", REPLICATE),
        ("PowerSGD-4", BF16, "training.mixed_precision_reduce"),
    ],
)
def test_what_a_method_does_not_fit_is_refused_in_one_line(name, option, key):
    arguments = [
        *(f"job.config_file={ROOT}/train_configs/debug_small.toml", f"optimizer.name={name}"),
        *("experimental.custom_import=scripts.research.race.rivals", "model.name=llama_full"),
        *("optimizer.tsr_rank=12", "optimizer.tsr_embedding_rank=12", f"{REPLICATE}=2"),
        *("training.local_batch_size=4", "training.global_batch_size=8", "checkpoint.no_enable"),
    ]
    config = build_job_config([f"--{argument}" for argument in [*arguments, option]])
    with pytest.raises(ConfigError) as error:
        check_job_config(config, 2, "cpu", on_paper=True, data="none")
    text = str(error.value)
    assert text.startswith(f"{key}: got ") and "\n" not in text
    assert name in text
