# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which plans, settings and widths go together, and where a plan puts a stage's parameters."""

from typing import Any

import pytest

from tests.unit.tiny import tiny_args
from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, check_gather, resolve_settings

LANES = {"lanes": 4, "sync_fraction": 0.5}


def test_the_schema_which_loads_no_torch_names_the_plans() -> None:
    assert ["auto", *PLANS] == TP_PLANS


@pytest.mark.parametrize(
    ("settings", "family", "changes", "degrees", "message"),
    [
        # Without effect.
        (TPSettings("megatron"), "cola", {}, (1, 2), "tp_plan: "),
        (TPSettings("btp"), "full", {}, (1, 2), "tp_plan: "),
        (TPSettings("vanilla", norm="sync"), "cola", {}, (1, 2), "tp_norm: "),
        (TPSettings("vanilla", comm="sequence"), "cola", {}, (1, 2), "tp_comm: "),
        (TPSettings("megatron", grouping=False), "full", {}, (1, 2), "tp_grouping: "),
        (TPSettings("caat", comm="sequence"), "full", LANES, (1, 2), "tp_comm: "),
        # Widths that the ranks do not divide.
        (TPSettings("btp"), "cola", {"n_heads": 2}, (4,), "tensor_parallel_degree: .*n_heads = "),
        (TPSettings("btp"), "cola", {"ffn_dim": 90}, (4,), "tensor_parallel_degree: .*ffn_dim = "),
        (TPSettings("btp"), "cola", {"vocab_size": 97}, (4,), "tensor_parallel_degree: .*vocab_s"),
        (TPSettings("vanilla"), "cola", {"rank_ffn": 18}, (4,), "tensor_parallel_degree: .*rank_"),
        (TPSettings(), "full", {"lanes": 2}, (4,), r"tensor_parallel_degree: .*caat\.lanes = 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: TPSettings, family: str, changes: Any, degrees: tuple[int, ...], message: str
) -> None:
    args = tiny_args(family, **changes)
    for degree in degrees:
        with pytest.raises(ConfigError, match=rf"^parallelism\.{message}") as error:
            resolve_settings(settings, args, degree, 16)
        assert "\n" not in str(error.value)
    if degrees == (4,):
        assert resolve_settings(settings, args, 1, 16).plan != "auto"


@pytest.mark.parametrize(
    ("plan", "family", "degree", "message"),
    [
        ("megatron", "full", 1, "'kv' for llama_full, which has no latents"),
        ("vanilla", "cola", 2, "'kv' under the plan vanilla, or the plan btp"),
    ],
)
def test_latents_that_are_not_whole_are_not_gathered(
    plan: str, family: str, degree: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^parallelism\.cp_gather: got 'latents', .*{message}"):
        check_gather("latents", tiny_args(family), TPSettings(plan), degree)
    check_gather("kv", tiny_args(family), TPSettings(plan), degree)
    whole = TPSettings("vanilla" if degree == 1 else "btp")
    check_gather("latents", tiny_args("cola"), whole, degree)
