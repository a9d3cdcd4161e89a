# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes of parameters and optimizer state in closed form, against real tensors of one process."""

import pytest

from tests.unit.tiny import FAMILIES, tiny_args
from torchtitan_lr.costs.fsdp_messages import named_parameters
from torchtitan_lr.costs.held_memory import Precision, gathered_unit_bytes
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.parallel.plan_parts import TPSettings


def shapes_of(args):
    units = named_parameters(args, TPSettings("btp"), 1)
    return {name: shape for unit in units.values() for name, shape in unit.items()}


@pytest.mark.parametrize("gate", ["identity", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_the_models(family, gate):
    changes = {"lax_gate": gate} if family == "lax" else {}
    args = tiny_args(family, n_kv_heads=2, **changes)
    assert shapes_of(args) == model_shapes(args)


def test_gathered():
    units = [{"e": (100,)}, {"b0": (10,)}, {"b1": (10,)}, {"h": (200,)}]
    precision = Precision(4, 2, 4)
    # In the head: it and a block whole, its gradients in both dtypes.
    assert gathered_unit_bytes(units, units[3], True, precision) == 2 * 210 + 6 * 200
    assert gathered_unit_bytes(units, units[3], False, precision) == 2 * 320 + 6 * 200
    assert gathered_unit_bytes(units[1:3], None, True, precision) == 2 * 20 + 6 * 10
    assert gathered_unit_bytes([], None, True, precision) == 0
