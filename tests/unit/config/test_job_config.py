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
        ("low_rank.activation", "flavor"),
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
