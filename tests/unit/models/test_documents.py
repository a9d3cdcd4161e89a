# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Packed documents give the loss and the gradients of each document alone (fp64)."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.documents import alone, difference, masks_of_blocks, together
from tests.unit.tiny import FAMILIES, build_tiny
from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS, FLEX_ATTENTION, FLEX_ATTENTION_CALL
from torchtitan_lr.models.llama import separate
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(params=["added", "blocks"])
def mask(request):
    with masks_of_blocks() if request.param == "blocks" else nullcontext():
        yield


CASES = [(family, {}) for family in FAMILIES]
CASES += [("cola", {"n_kv_heads": 2}), ("full", {"lanes": 2, "sync_fraction": 0.5})]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_loss_and_gradients_are_those_of_each_document(family, changes, mask):
    model = build_tiny(family, torch.float64, **changes)
    expected = alone(model)
    assert difference(together(model), expected) < 1e-12
    assert difference(together(model, change=torch.zeros_like), expected) > 1e-2


class Runs(TorchDispatchMode):
    """Counts forward runs of attention."""

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (*ATTENTION_OPERATORS, FLEX_ATTENTION, FLEX_ATTENTION_CALL)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("save_attention", [True, False])
def test_low_rank_checkpointing(save_attention, mask):
    model = build_tiny("lax", torch.float64)
    expected = together(model)
    apply_low_rank_checkpoint(model, save_attention)
    with Runs() as runs:
        assert difference(together(model), expected) < 1e-12
    assert runs.count == len(model.layers) * (1 if save_attention else 2)


def test_a_mask_of_blocks_is_small_and_skips_what_no_token_sees():
    found = torch.arange(4).repeat_interleave(512)[None]  # of 2,048 tokens
    with masks_of_blocks():
        _, blocks = separate(found, torch.bfloat16)
    # Of 16 × 16 blocks of scores, 4 documents have 4 × 4 each, 10 of them not above the diagonal.
    assert int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()) == 40
    tensors = [x for x in blocks.as_tuple() if isinstance(x, torch.Tensor)]
    size = sum(x.nbytes for x in tensors)
    assert 100 * size < separate(found, torch.bfloat16)[1].nbytes == 2 * 2048**2
