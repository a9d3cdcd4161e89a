# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes of parameters and optimizer state in closed form, against real tensors of one process."""

from functools import partial

import pytest
import torch

from tests.unit.tiny import FAMILIES, build_tiny, tiny_args
from torchtitan_lr.costs.fsdp_messages import named_parameters
from torchtitan_lr.costs.held_memory import (
    Precision,
    gathered_unit_bytes,
    static_memory,
    tsr_state,
)
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices
from torchtitan_lr.parallel.plan_parts import TPSettings

FP32 = Precision(4, 4, 4)
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def shapes_of(args):
    units = named_parameters(args, TPSettings("btp"), 1)
    return {name: shape for unit in units.values() for name, shape in unit.items()}


@pytest.mark.parametrize("gate", ["identity", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_the_models(family, gate):
    changes = {"lax_gate": gate} if family == "lax" else {}
    args = tiny_args(family, n_kv_heads=2, **changes)
    assert shapes_of(args) == model_shapes(args)


@pytest.mark.parametrize("family", FAMILIES)
def test_adamw(family):
    model = build_tiny(family)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    expected = static_memory([shapes_of(model.model_args)], 1, FP32)
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert expected["optimizer"] == sum(t.numel() * t.element_size() for t in states)
    assert expected["weights"] == sum(4 * p.numel() for p in model.parameters())
    assert expected["gradients"] == expected["weights"]
    # The control: without the step counters it would not agree.
    assert expected["optimizer"] != 2 * expected["weights"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("projection", ["two_sided", "one_sided"])
def test_tsr_adam(projection, dtype):
    model = build_tiny("full", dtype)
    settings = TSRSettings(rank=8, embedding_rank=4, projection=projection)
    optimizer = TSRAdam(model.named_parameters(), settings, **HYPER)
    plans = plan_matrices(shapes_of(model.model_args), settings)
    precision = Precision(dtype.itemsize, 2, 4)
    expected = static_memory(
        [shapes_of(model.model_args)], 1, precision, partial(tsr_state, size=4, plans=plans)
    )
    tensors = {
        t.data_ptr(): t.numel() * t.element_size()
        for state in optimizer.state.values()
        for t in state.values()
    }
    assert len(plans) > 20 and expected["optimizer"] == sum(tensors.values())
    dense = static_memory([shapes_of(model.model_args)], 1, FP32)
    assert expected["optimizer"] < dense["optimizer"] / 2


def test_gathered():
    units = [{"e": (100,)}, {"b0": (10,)}, {"b1": (10,)}, {"h": (200,)}]
    precision = Precision(4, 2, 4)
    # In the head: it and a block whole, its gradients in both dtypes.
    assert gathered_unit_bytes(units, units[3], True, precision) == 2 * 210 + 6 * 200
    assert gathered_unit_bytes(units, units[3], False, precision) == 2 * 320 + 6 * 200
    assert gathered_unit_bytes(units[1:3], None, True, precision) == 2 * 20 + 6 * 10
    assert gathered_unit_bytes([], None, True, precision) == 0
