# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from torchtitan_lr.compression.settings import compression_settings, is_compressed
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
