# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a configuration makes of a codec, and the paper's bits a parameter."""

import sys

import pytest
import torch

from tests.support.codecs import reduce_in_process
from torchtitan_lr.compression.settings import (
    CODECS,
    LEVELS,
    Unit,
    bits_per_entry,
    compression_settings,
    exchange_traffic,
)
from torchtitan_lr.compression.sketch import peels, smallest_theta
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import CODEC_NAMES
from torchtitan_lr.errors import ConfigError


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_our_bits_per_parameter(level, ranks):
    c, theta = LEVELS[level]
    for half, b in ((False, 32), (True, 16)):
        returned = min(b, 1 + b * ranks * (1 - theta))  # to HSDP's replicas
        for name, bits in (("sketch", 1 + b / c), ("sparse", 1 + b * (1 - theta))):
            codec = CODECS[name](ranks, c, theta, half)
            assert bits_per_entry(codec) == pytest.approx(bits, rel=1e-6)
            assert bits_per_entry(codec, True) == pytest.approx(bits + returned, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64, 512])
@pytest.mark.parametrize("c", [0.5, 0.75, 0.76, 1, 2, 4, 10, 100])
def test_the_smallest_theta_passes_and_none_below_it(c, ranks):
    theta = smallest_theta(c, ranks)
    assert 0 <= theta < 1 and peels(c, theta, ranks)
    if theta:
        below = 1 - theta + 1.01e-4 if theta < 0.999 else 1.12 * (1 - theta)
        assert not peels(c, 1 - below, ranks)
    assert theta == round(theta, 4 if theta < 0.998 else 12)


def settings(*options):
    config = build_job_config(["--grad_compression.codec=sketch", *options])
    return compression_settings(config, ranks=4)


def test_a_second_residual_only_where_the_first_is_needed_meanwhile():
    assert settings("--training.max_skipped_steps=1").revocable
    assert not settings().revocable


NAMED, MODULE = "--grad_compression.codec=sign", "--experimental.custom_import=tests.toy_codec"
HALF = "--training.mixed_precision_reduce=bfloat16"


@pytest.fixture
def sign():
    """A codec from outside as a run has it: the module is imported because the run names it."""
    yield settings(NAMED, MODULE).codec
    sys.modules.pop("tests.toy_codec")
    CODECS.pop("sign")
    CODEC_NAMES.remove("sign")


def test_a_codec_from_outside_is_accepted_counted_and_loses_nothing(sign):
    rows = torch.randn(4, 4, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    totals, residuals, _ = reduce_in_process(sign, rows, seed=0)
    torch.testing.assert_close(totals + residuals.sum(0), rows.sum(0))
    size = rows.abs().mean(2, keepdim=True)
    torch.testing.assert_close(totals, (size * torch.where(rows < 0, -1, 1)).sum(0))
    # It sends every entry, so theta has no effect.
    assert sign.theta == 0 and bits_per_entry(sign) == pytest.approx(1, abs=1e-6)
    assert exchange_traffic(Unit(4, 80, 5), sign) == [
        ("all_to_all", "index", 40),
        ("all_to_all", "gradient", 4),
        ("reduce_scatter", "gradient", 20),
    ]
    assert ("all_gather", "gradient", 320) in exchange_traffic(Unit(4, 80), sign, all_reduce=True)


def test_codecs_that_do_not_fit_are_refused(sign):
    with pytest.raises(ConfigError, match=r"'float32' with grad_compression\.codec = 'sign'"):
        settings(NAMED, MODULE, HALF)
    assert settings("--grad_compression.codec=sparse", HALF).codec.half
    with pytest.raises(ConfigError, match=r"'sketch', 'sign'"):
        settings("--grad_compression.codec=sgn")
