# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan_lr.config.schema import BUILT_IN_PLANS
from torchtitan_lr.costs.rehearsal import fake_ranks
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.one_device import Planned
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import (
    PLANS,
    apply_tensor_parallel,
    check_gather,
    resolve_settings,
)


def tiny(family: str = "cola", **changes: Any) -> LlamaArgs:
    low_rank = family != "full"
    args = LlamaArgs(
        family=family,
        dim=64,
        n_layers=2,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=88,
        vocab_size=64,
        max_seq_len=16,
        rank_attention=12 if low_rank else 0,
        rank_ffn=20 if low_rank else 0,
        activation="fullrank" if family in ("full", "svd") else "both",
    )
    return replace(args, **changes)


def test_the_keys_values_are_the_plans() -> None:
    """The schema, which loads no torch, names what the table has."""
    assert list(PLANS) == list(BUILT_IN_PLANS)


LANES = {"lanes": 4, "sync_fraction": 0.5}


@pytest.mark.parametrize(
    ("settings", "family", "changes", "key"),
    [
        # Without effect.
        (TPSettings("megatron"), "cola", {}, "tp_plan"),
        (TPSettings("btp"), "full", {}, "tp_plan"),
        (TPSettings("vanilla", norm="sync"), "cola", {}, "tp_norm"),
        (TPSettings("vanilla", comm="sequence"), "cola", {}, "tp_comm"),
        (TPSettings("megatron", grouping=False), "full", {}, "tp_grouping"),
        # Not with lanes.
        (TPSettings("caat", comm="sequence"), "full", LANES, "tp_comm"),
    ],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_settings_that_do_not_fit_are_refused(
    settings: TPSettings, family: str, changes: dict[str, Any], key: str, degree: int
) -> None:
    with pytest.raises(ConfigError, match=rf"^parallelism\.{key}: ") as error:
        resolve_settings(settings, tiny(family, **changes), degree, 16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("plan", "family", "degree", "message"),
    [
        ("megatron", "full", 1, "'kv' for llama_full, which has no latents"),
        ("vanilla", "cola", 2, "'kv' under the plan vanilla, or the plan btp"),
        ("vanilla_replicated", "lax", 4, "'kv' under the plan vanilla_replicated, or"),
    ],
)
def test_latents_that_are_not_whole_are_not_gathered(
    plan: str, family: str, degree: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^parallelism\.cp_gather: got 'latents', .*{message}"):
        check_gather("latents", tiny(family), TPSettings(plan), degree)
    check_gather("kv", tiny(family), TPSettings(plan), degree)
    check_gather("latents", tiny(), TPSettings("vanilla" if degree == 1 else "btp"), degree)


def test_ranks_share_out_the_lanes() -> None:
    args = tiny("full", lanes=4)
    for degree in (1, 2, 4):
        assert resolve_settings(TPSettings(), args, degree, 16).plan == "caat"
    few = tiny("full", lanes=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree: got 4, .*caat\.lanes = 2"):
        resolve_settings(TPSettings(), few, 4, 16)


@pytest.mark.parametrize(
    ("changes", "plan", "width"),
    [
        ({"n_heads": 2, "n_kv_heads": 2}, "btp", "n_heads"),
        ({"ffn_dim": 90}, "btp", "ffn_dim"),
        ({"vocab_size": 65}, "btp", "vocab_size"),
        ({"rank_ffn": 18}, "vanilla_replicated", "rank_ffn"),
    ],
)
def test_widths_that_do_not_divide_are_refused(
    changes: dict[str, Any], plan: Any, width: str
) -> None:
    settings = TPSettings(plan)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_degree: got 4.*{width} = "):
        resolve_settings(settings, tiny(**changes), 4, 16)
    assert resolve_settings(settings, tiny(**changes), 1, 16) == settings


@pytest.mark.parametrize(
    ("family", "plan"),
    [("svd", "btp"), ("lax", "vanilla_replicated"), ("full", "megatron"), ("full", "caat")],
)
def test_a_plan_places_every_parameter_of_a_stage(family: str, plan: str) -> None:
    with torch.device("meta"):
        model = LlamaModel(tiny(family, lanes=4 if plan == "caat" else 1))
    model.tok_embeddings = None  # a later pipeline stage
    del model.layers["0"]
    with fake_ranks(2) as mesh:
        assert mesh is not None
        apply_tensor_parallel(model, mesh, TPSettings(plan))
    halves = 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        halves += 2 * parameter.to_local().numel() == parameter.numel()
    assert halves == sum(p.ndim == 2 for p in model.parameters()) + 3 * (plan == "btp")
    assert {type(m.plan) for m in model.modules() if isinstance(m, Planned)} == {PLANS[plan]}
