# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A codec from outside the package is accepted, refused, run and counted like the others."""

import importlib
import sys

import pytest
import torch

from tests.oracle.compression import bits_per_entry
from tests.unit.formulas.test_formulas_disagree import RANKS, compared, four_ranks
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.compression.codecs import (
    CODECS,
    build_codec,
    codec_bits,
    reduce_in_process,
    unit_codec,
)
from torchtitan_lr.compression.settings import compression_settings
from torchtitan_lr.compression.sizes import CodecSizes
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.methods import GRAD_CODECS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.memory import buffer_bytes
from torchtitan_lr.estimate.run import read_run
from torchtitan_lr.estimate.traffic import exchanged_units, step_traffic
from torchtitan_lr.formulas.compression import FORMULAS, leaves_residual, sent_entries

__all__ = ["four_ranks"]  # a fixture

NAMED = "--grad_compression.codec=strided"
MODULE = "--experimental.custom_import=tests.toy_codec"
TOY = CodecSizes("strided", 1, 0.9)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    yield
    sys.modules.pop("tests.toy_codec", None)
    for registry in (CODECS, FORMULAS):
        registry.pop("strided", None)
    if "strided" in GRAD_CODECS:
        GRAD_CODECS.remove("strided")


@pytest.fixture
def _registered():
    importlib.import_module("tests.toy_codec")


def config_of(*arguments):
    common = ["--job.config_file=train_configs/debug_full.toml", "--training.local_batch_size=1"]
    config = build_job_config([*common, NAMED, MODULE, *arguments])
    check_job_config(config, RANKS, "cpu")
    return config


def test_every_name_has_a_codec_and_a_formula():
    assert ["none", *CODECS] == GRAD_CODECS
    assert CODECS.keys() == FORMULAS.keys()
    for name, codec in CODECS.items():
        assert codec.name == name and codec.lossy == leaves_residual(CodecSizes(name))


def test_an_unregistered_name_is_refused():
    for arguments in ([], ["--experimental.custom_import=tests.scripts"]):
        with pytest.raises(ConfigError) as info:
            build_job_config([NAMED, *arguments])
        known = "'none', 'dense', 'sparse', 'sketch'"
        assert str(info.value) == f"grad_compression.codec: got 'strided', expected one of {known}"


def test_a_registered_codec_is_accepted_from_a_toml_too(tmp_path):
    settings = compression_settings(config_of(), RANKS)
    assert settings.codec == CodecSizes("strided", 10, 0.9875)
    toml = tmp_path / "toy.toml"
    toml.write_text(
        '[grad_compression]\ncodec = "strided"\n[experimental]\ncustom_import = "tests.toy_codec"\n'
    )
    assert build_job_config([f"--job.config_file={toml}"]).grad_compression.codec == "strided"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--level=custom", "--theta=0.4"], "theta: got 0.4, expected at least 0.5 with strides"),
        (["--theta=1"], "theta: got 1.0, expected a number in [0, 1)"),
        (["--min_size=99999999"], "min_size: got 99999999, expected the size of some tensor"),
        (["--layers=patterns", "--patterns=x.*"], "patterns: got ['x.*'], expected patterns that"),
    ],
)
def test_it_is_refused_in_one_line_like_the_others(arguments, text):
    with pytest.raises(ConfigError) as info:
        config_of(*(argument.replace("--", "--grad_compression.") for argument in arguments))
    assert str(info.value).startswith(f"grad_compression.{text}")
    assert "\n" not in str(info.value)


def test_a_layout_that_shards_nothing_is_refused():
    with pytest.raises(ConfigError) as info:
        config_of(f"--parallelism.data_parallel_replicate_degree={RANKS}")
    text = "grad_compression.codec: got 'strided', expected 'none' unless FSDP shards"
    assert str(info.value).startswith(text)


@pytest.mark.usefixtures("_registered")
def test_rows_are_reduced_with_error_feedback():
    """In whole numbers every sum is exact; after as many steps as a stride all has arrived."""
    codec, m = build_codec(TOY, RANKS), 1000
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(RANKS, RANKS, m, generator=generator) * 1000).round()
    owed, arrived = x, torch.zeros(RANKS, m)
    for step in range(10):
        totals, after, _ = reduce_in_process(codec, owed, step)
        assert torch.equal(totals + after.sum(0), owed.sum(0))
        assert int(totals.count_nonzero(dim=1).max()) <= 100 and after.any() == (step < 9)
        owed, arrived = after, arrived + totals
    assert torch.equal(arrived, x.sum(0))


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("all_reduce", [False, True])
def test_its_bytes_are_those_of_its_formula(all_reduce, four_ranks, monkeypatch):
    assert compared(TOY, all_reduce, four_ranks) == ([], 0)
    toy = sys.modules["tests.toy_codec"]
    replicas = RANKS if all_reduce else 0
    bits = sum(codec_bits(TOY, replicas).values())
    assert bits == pytest.approx(bits_per_entry(TOY, RANKS, all_reduce), rel=1e-6)
    monkeypatch.setattr(toy, "sent_entries", lambda *args: sent_entries(*args) + 1)
    assert compared(TOY, all_reduce, four_ranks)[0]


def test_the_estimate_counts_it():
    run = read_run(config_of(), RANKS)
    units = exchanged_units(run)
    assert {codec.name for _, _, codec in units} == {"strided"}
    owned = [unit.compressed for _, unit, _ in units if unit.compressed]
    sent = RANKS * sum(sent_entries(m, 0.9875) for m in owned)
    dense = sum(unit.ranks * unit.dense for _, unit, _ in units)
    rows = [row for row in step_traffic(run, 0) if row.role == "gradient"]
    assert {row.op for row in rows} == {"reduce_scatter"}
    assert sum(row.elements for row in rows) == sent + dense
    assert not [row for row in step_traffic(run, 0) if row.role == "index"]
    residuals = sum(4 * unit.ranks * unit.compressed for _, unit, _ in units)
    assert buffer_bytes(run, 0) > residuals > 0


@pytest.mark.usefixtures("_registered")
def test_it_has_no_size_limit():
    assert unit_codec(TOY, 1, RANKS, False) == TOY
    assert build_codec(TOY, RANKS).describe() == "strided"
