# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A codec from outside the package is accepted, counted, and loses nothing."""

import sys

import pytest
import torch

from tests.support.codecs import reduce_in_process
from torchtitan_lr.compression.codecs import CODECS
from torchtitan_lr.compression.settings import compression_settings
from torchtitan_lr.compression.sizes import FORMULAS, Unit, bits_per_entry, exchange_traffic
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import CODEC_NAMES
from torchtitan_lr.errors import ConfigError

NAMED, MODULE = "--grad_compression.codec=sign", "--experimental.custom_import=tests.toy_codec"


@pytest.fixture
def sizes():
    """The codec as a run has it: the module is imported because the run names it."""
    config = build_job_config([NAMED, MODULE])
    yield compression_settings(config, ranks=4).codec
    sys.modules.pop("tests.toy_codec")
    for registry in (CODECS, FORMULAS):
        registry.pop("sign")
    CODEC_NAMES.remove("sign")


def test_sums_and_residuals_are_the_gradients(sizes):
    rows = torch.randn(4, 4, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    totals, residuals, _ = reduce_in_process(CODECS["sign"](4, sizes), rows, seed=0)
    torch.testing.assert_close(totals + residuals.sum(0), rows.sum(0))
    size = rows.abs().mean(2, keepdim=True)
    torch.testing.assert_close(totals, (size * torch.where(rows < 0, -1, 1)).sum(0))


def test_its_formula_is_used_and_theta_is_not(sizes):
    assert sizes.theta == 0 and bits_per_entry(sizes) == pytest.approx(1, abs=1e-6)
    assert exchange_traffic(Unit(4, 80, 5), sizes) == [
        ("all_to_all", "index", 40),
        ("all_to_all", "gradient", 4),
        ("reduce_scatter", "gradient", 20),
    ]
    assert ("all_gather", "gradient", 320) in exchange_traffic(Unit(4, 80), sizes, all_reduce=True)


def test_a_codec_that_cannot_round_is_refused_with_bf16_on_the_wire(sizes):
    half = "--training.mixed_precision_reduce=bfloat16"
    with pytest.raises(ConfigError, match=r"'float32' with grad_compression\.codec = 'sign'"):
        compression_settings(build_job_config([NAMED, MODULE, half]), ranks=4)
    sparse = compression_settings(build_job_config(["--grad_compression.codec=sparse", half]), 4)
    assert sparse.codec.half and not sizes.half


def test_a_name_that_nobody_registered_is_refused(sizes):
    with pytest.raises(ConfigError, match=r"'sketch', 'sign'"):
        build_job_config(["--grad_compression.codec=sgn"])
