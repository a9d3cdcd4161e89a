# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which plans, settings and widths go together, and which blocks a pipeline's stage holds."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.tiny import tiny_args
from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, check_gather, resolve_settings
from torchtitan_lr.parallel.stage_split import layers_before_boundaries, modules_per_stage

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


@pytest.mark.parametrize(
    ("schedule", "degree", "per_stage", "ends", "layers", "before"),
    [
        ("1F1B", 2, None, 1, 4, [2]),
        ("1F1B", 4, None, 1, 4, [1, 3, 4]),  # the last stage has the head alone
        ("1F1B", 4, None, 0, 4, [1, 2, 3]),
        ("Interleaved1F1B", 2, None, 1, 8, [2, 5, 7]),
        ("ZBVZeroBubble", 2, None, 1, 8, [2, 5, 7]),
        ("Interleaved1F1B", 2, 2, 1, 10, [1, 3, 5, 7, 9]),
    ],
)
def test_blocks_before_each_boundary(schedule, degree, per_stage, ends, layers, before):
    section = SimpleNamespace(
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_degree=degree,
        pipeline_parallel_layers_per_stage=per_stage,
        pipeline_parallel_first_stage_less_layers=ends,
        pipeline_parallel_last_stage_less_layers=ends,
        module_fqns_per_model_part=None,
    )
    config = SimpleNamespace(parallelism=section)
    assert layers_before_boundaries(config, layers) == before
    names = [name for stage in modules_per_stage(config, layers) for name in stage]
    blocks = [f"layers.{i}" for i in range(layers)]
    assert names == ["tok_embeddings", *blocks, "norm", "output"]
