# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest

from torchtitan_lr.config.build import build_job_config


@pytest.fixture(scope="module")
def config():
    return build_job_config([])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("debug.seed", 0),
        ("low_rank.rank", 0),
        ("low_rank.rank_attention", 0),
        ("low_rank.rank_ffn", 0),
        ("low_rank.activation", "flavor"),
        ("low_rank.lax_gate", "identity"),
        ("metrics.wandb_project", "torchtitan_lr"),
        ("metrics.wandb_mode", "auto"),
        ("metrics.wandb_tags", []),
        ("training.max_skipped_steps", 0),
        ("training.dataset", "cpython"),
        ("training.max_norm", 0.5),
        ("validation.dataset", "training"),
        ("checkpoint.last_save_model_only", False),
        ("optimizer.name", "AdamW"),
        ("optimizer.beta2", 0.999),
        ("optimizer.weight_decay", 0.01),
        ("model.name", "llama_cola"),
        ("model.flavor", "debug"),
        ("model.hf_assets_path", "torchtitan_lr/data/assets/bpe4k"),
        ("job.custom_config_module", "torchtitan_lr.config.schema"),
        ("experimental.custom_import", "torchtitan_lr.training.register"),
        # Untouched by ours, so the merge must have kept torchtitan's.
        ("optimizer.beta1", 0.9),
        ("training.seq_len", 2048),
    ],
)
def test_defaults_after_the_merge(config, key, value):
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value


def test_merge_is_torchtitans_class(config):
    from torchtitan_lr.titan.base import JobConfig

    assert isinstance(config, JobConfig)
