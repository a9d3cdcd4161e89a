# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from torchtitan_lr.compression.settings import (
    compression_settings,
    is_compressed,
)
from torchtitan_lr.config.build import build_job_config

SIZES = {
    "tok_embeddings.weight": 1000,
    "layers.0.attention_norm.weight": 10,
    "layers.0.attention.wq.weight": 300,
    "layers.0.attention.wk.A.weight": 300,
    "layers.0.attention.wv.B.weight": 300,
    "layers.0.attention.wo.weight": 300,
    "layers.0.feed_forward.w1.weight": 400,
    "layers.1.feed_forward.w1.weight": 400,
    "output.weight": 990,
}


def settings(ranks=4, **changes):
    config = build_job_config(["--grad_compression.codec=sketch"])
    for key, value in {"min_size": 100, **changes}.items():
        setattr(config.grad_compression, key, value)
    return compression_settings(config, ranks)


def chosen(**changes):
    return {n for n, size in SIZES.items() if is_compressed(n, size, settings(**changes))}


def test_all_but_the_small():
    assert chosen() == SIZES.keys() - {"layers.0.attention_norm.weight"}
    assert chosen(min_size=991) == {"tok_embeddings.weight"}
    assert chosen(min_size=1) == SIZES.keys()


@pytest.mark.parametrize(
    ("ranks", "auto", "theta"), [(4, False, 0.9875), (4, True, 0.9875), (8, True, 0.9904)]
)
def test_auto_raises_theta_only_where_needed(ranks, auto, theta):
    resolved = settings(ranks, auto=auto)
    assert resolved.codec.theta == theta and resolved.requested_theta == 0.9875
    assert resolved.codec.c == 10


def test_levels_override_c_and_theta_and_custom_does_not():
    assert settings(2, level="2x", c=7.0, theta=0.5).codec.theta == 0.8
    custom = settings(2, level="custom", c=1.0, theta=0.5)
    assert (custom.codec.c, custom.codec.theta) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("options", "revocable"),
    [
        ([], False),
        (["--training.max_skipped_steps=1"], True),
        (["--checkpoint.async_mode=async"], False),
        (["--checkpoint.async_mode=async_with_pinned_mem"], True),
    ],
)
def test_a_second_residual_only_where_the_first_is_needed_meanwhile(options, revocable):
    config = build_job_config(["--grad_compression.codec=sketch", *options])
    assert compression_settings(config, 4).revocable is revocable
