# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which blocks are checkpointed, whatever this process built before and whoever holds them."""

from types import SimpleNamespace

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from tests.unit.tiny import build_tiny
from torchtitan_lr.parallel.recompute import apply_activation_checkpoint
from torchtitan_lr.titan.base import ActivationCheckpoint

EVERY_SECOND = SimpleNamespace(
    activation_checkpoint=ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    compile=SimpleNamespace(enable=False, components=[]),
    job=SimpleNamespace(dump_folder=""),
)


def wrapped(model):
    return [name for name, block in model.layers.items() if isinstance(block, CheckpointWrapper)]


def test_every_second_block_whatever_was_built_before():
    models = [build_tiny("cola", n_layers=3) for _ in range(2)]
    for model in models:
        apply_activation_checkpoint(model, EVERY_SECOND)
    assert [wrapped(model) for model in models] == [["1"], ["1"]]


@pytest.mark.parametrize(("held", "expected"), [("123", ["1", "3"]), ("23", ["3"])])
def test_a_stage_wraps_the_blocks_that_the_whole_model_wraps(held, expected):
    model = build_tiny("cola", n_layers=4)
    for name in set("0123") - set(held):
        del model.layers[name]
    apply_activation_checkpoint(model, EVERY_SECOND)
    assert wrapped(model) == expected
