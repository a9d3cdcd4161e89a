# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The lists of docs/choose.md are the matrix, which agrees with the configuration's checks."""

import random

import pytest

from scripts.support_table import PAGE
from tests.support.support_matrix import SupportMatrix, pairs, world_size
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

MATRIX = SupportMatrix()
TINY = [
    "--model.flavor=debug",
    "--model.hf_assets_path=torchtitan_lr/data/assets/bpe4k",
    "--training.seq_len=32",
    "--training.mixed_precision_param=float32",
]


def check(combination):
    arguments = [*TINY, *MATRIX.arguments(combination)]
    check_job_config(build_job_config(arguments), world_size(combination), "cpu", data="none")


def test_the_page_has_these_lists():
    assert MATRIX.table() in PAGE.read_text(), "run python -m scripts.support_table"


def test_what_is_drawn_is_accepted_or_refused_as_the_matrix_says():
    source = random.Random(4)
    accepted = refused = 0
    for _ in range(160):
        combination = MATRIX.draw(source)
        keys = {rule["key"] for rule in MATRIX.refusals(combination)}
        if not keys:
            check(combination)
            accepted += 1
            continue
        with pytest.raises(ConfigError) as refusal:
            check(combination)
        assert refusal.value.key in keys, combination
        assert "\n" not in str(refusal.value)
        refused += 1
    assert accepted > 15 and refused > 15


@pytest.mark.parametrize("rule", MATRIX.rules, ids=lambda rule: "-".join(rule["when"]))
def test_every_rule_refuses_by_its_key(rule):
    """With the first of its values, and nothing else that could be refused."""
    parts = dict.fromkeys(MATRIX.axes, "none") | {"family": "svd"}
    parts |= {axis: values[0] for axis, values in rule["when"].items()}
    assert MATRIX.refusals(parts) == [rule]
    with pytest.raises(ConfigError) as refusal:
        check(parts)
    assert refusal.value.key == rule["key"]
    # The control: without the last of its axes it is accepted.
    axis = list(rule["when"])[-1]
    check(parts | {axis: "none"})


@pytest.mark.nightly  # which alone trains the draws
def test_draws_are_the_same_every_time_and_cover_every_cell_and_value():
    draws = MATRIX.every_draw
    assert draws == SupportMatrix().every_draw
    assert MATRIX.working_pairs <= {pair for drawn in draws for pair in pairs(drawn)}
    values = {item for combination in draws for item in combination.items()}
    assert values == {(axis, value) for axis in MATRIX.axes for value in MATRIX.axes[axis]}
