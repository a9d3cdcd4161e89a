# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Layouts that cannot generate are refused before any rank starts."""

from types import SimpleNamespace

import pytest

from tests.unit.tiny import tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.generate_ranks import read_parallelism
from torchtitan_lr.parallel.generation import generation_settings

LANES = {"lanes": 4, "sync_fraction": 0.5}


@pytest.mark.parametrize(
    ("family", "model", "plan", "degree", "part"),
    [
        ("cola", {}, "megatron", 4, "parallelism.tp_plan: got 'megatron'"),
        ("cola", {"n_kv_heads": 2}, "btp", 4, "tensor_parallel_degree: got 4, expected a"),
        ("full", LANES, "caat", 3, "expected a divisor of caat.lanes = 4"),
    ],
)
def test_refusals(family, model, plan, degree, part):
    args = tiny_args(family, **model)
    with pytest.raises(ConfigError, match=part) as info:
        generation_settings(SimpleNamespace(tp_plan=plan), args, degree)
    assert "\n" not in str(info.value)


def test_a_token_is_not_shared_by_ranks():
    section = SimpleNamespace(tp_plan="btp", tp_comm="sequence", tp_norm="sync")
    settings = generation_settings(section, tiny_args("cola"), 4)
    assert (settings.comm, settings.norm, settings.loss_parallel) == ("all_reduce", "sync", True)


@pytest.mark.parametrize(
    ("override", "world", "part"),
    [
        ("tensor_parallel_degree=2", 4, "got 2, expected 4, the number of ranks"),
        ("tensor_parallel_degree=4", 1, "expected 1, or a start with torchrun --nproc_per_node=4"),
        ("pipeline_parallel_degree=2", 2, "expected 1: generation has the model as one pipeline"),
        ("data_parallel_shard_degree=2", 2, "expected 1: generation has weights that only"),
        ("tp_pln=btp", 2, "did you mean parallelism.tp_plan"),
        ("disable_loss_parallel", 2, "generation has no other"),
    ],
)
def test_layouts_without_use_are_refused(override, world, part):
    with pytest.raises(ConfigError, match=part) as info:
        read_parallelism(SimpleNamespace(), [f"--parallelism.{override}"], world)
    assert "\n" not in str(info.value)


def test_the_runs_plan_is_kept_and_its_degrees_are_not():
    record = SimpleNamespace(tp_plan="vanilla", tp_grouping=False, pipeline_parallel_degree=2)
    overrides = ["--parallelism.tp_grouping", "--parallelism.pipeline_parallel_degree=1"]
    found = read_parallelism(SimpleNamespace(parallelism=record), overrides, 2)
    assert (found.tp_plan, found.tp_grouping) == ("vanilla", True)
    with pytest.raises(ConfigError, match=r"^training.steps: got 5"):
        read_parallelism(SimpleNamespace(), ["--training.steps=5"], 1)
