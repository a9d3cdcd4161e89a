# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A pipeline that cannot run is refused in one line that names the key."""

import pytest

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

ASSETS = "torchtitan_lr/data/assets/bpe4k"
BASE = [
    "--model.name=llama_lax",
    "--model.flavor=debug",  # 4 blocks
    f"--model.hf_assets_path={ASSETS}",
    "--training.seq_len=32",
    "--training.local_batch_size=8",
    "--parallelism.pipeline_parallel_degree=2",
]
PIPELINE = "--parallelism.pipeline_parallel"
ZBV = f"{PIPELINE}_schedule=ZBVZeroBubble"
LOOPED = f"{PIPELINE}_schedule=Interleaved1F1B"


def check(*arguments, ranks=4):
    check_job_config(build_job_config([*BASE, *arguments]), ranks, "cpu")


@pytest.mark.parametrize(
    ("arguments", "key", "want"),
    [
        ([f"{PIPELINE}_degree=3"], "degree", "a divisor of"),
        ([f"{PIPELINE}_schedule=DualPipeV"], "schedule", "one of 1F1B, GPipe, Interleaved1F1B"),
        ([f"{PIPELINE}_schedule_csv=x.csv"], "schedule_csv", "'' with a pipeline"),
        ([ZBV, "--compile.enable"], "compile.enable", "one backward, not two"),
        ([f"{PIPELINE}_microbatch_size=8"], "microbatch_size", "at least 2 micro-batches"),
        ([LOOPED, "--training.local_batch_size=5"], "microbatch_size", "a multiple of 2 micro-"),
        ([ZBV, f"{PIPELINE}_degree=4"], "degree", "fewer stages than 8, into which 4 blocks"),
    ],
)
def test_refusals(arguments, key, want):
    with pytest.raises(ConfigError) as refusal:
        check(*arguments)
    message = str(refusal.value)
    assert key in refusal.value.key
    assert want in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "names",
    [
        [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "output"]],
        [["tok_embeddings", "layers.1", "layers.0"], ["layers.2", "layers.3", "norm", "output"]],
        [["tok_embeddings"], ["layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "output"]],
        [["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm"], ["output"]],
    ],
    ids=["one missing", "disorder", "three stages", "norm alone"],
)
def test_splits_that_are_given(names):
    config = build_job_config(BASE)
    config.parallelism.module_fqns_per_model_part = names
    with pytest.raises(ConfigError, match="module_fqns_per_model_part: got"):
        check_job_config(config, 4, "cpu")


@pytest.mark.parametrize(
    "arguments",
    [[], [ZBV], [LOOPED], [LOOPED, "--parallelism.pipeline_parallel_layers_per_stage=1"]],
)
def test_what_works_is_not_refused(arguments):
    check(*arguments)
