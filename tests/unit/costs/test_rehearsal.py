# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Blocks rehearsed without data leave what real ones leave; other plans: tests/distributed."""

from functools import cache

import pytest
import torch

from tests.oracle.activations import kept_bytes
from tests.support.allocations import Allocations
from tests.support.checkpointing import checkpointing
from tests.support.nightly import nightly
from tests.unit.tiny import build_tiny, tiny_args
from torchtitan_lr.costs.rehearsal import Workload, rehearse
from torchtitan_lr.parallel.plan_parts import TPSettings

BATCH, SEQ, LAYERS = 2, 16, 4
# The modes once, and the families where the blocks differ: LaX carries latents, full has none.
CASES = [("cola", mode) for mode in ("selective 2", "low_rank")]
CASES += [("full", "none"), *nightly(("lax", "low_rank"), ("cola", "none"), ("cola", "full"))]
CONTROL = {"cola": "full", "lax": "low_rank", "full": "full"}


@cache
def rehearsed(family, mode, dtype=torch.float32):
    period = 2 if mode == "selective 2" else 1
    args = tiny_args(family)
    settings = TPSettings("btp")
    return rehearse(Workload(args, settings, 1, BATCH, SEQ, dtype), checkpointing(mode), period)


def really_saved(family, mode):
    """Bytes that outlive the forward pass and the loss of a real model of four blocks."""
    model = build_tiny(family, n_layers=LAYERS, max_seq_len=SEQ)
    checkpointing(mode)(model)
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    outside = {t.untyped_storage()._cdata for t in (tokens, model.freqs_cis, *model.parameters())}
    packed = {}

    def pack(x):
        packed[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    allocations = Allocations()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), allocations:
        loss = model(tokens, targets=tokens)
    alive = allocations.bytes_alive(outside | {loss.untyped_storage()._cdata})
    return alive, sum(n for address, n in packed.items() if address not in outside)


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_saved_activations(family, mode):
    alive, packed = really_saved(family, mode)
    part = rehearsed(family, mode)
    estimate = LAYERS * part.block + part.ends
    assert estimate == alive
    if mode == "none":
        assert estimate == packed
    # The control: what another mode keeps is another number.
    other = rehearsed(family, "none" if mode != "none" else CONTROL[family])
    assert LAYERS * other.block + other.ends != pytest.approx(alive, rel=0.05)


@pytest.mark.parametrize(("family", "dtype"), [("lax", torch.float32), ("cola", torch.bfloat16)])
def test_low_rank_checkpointing_is_the_formula(family, dtype):
    args = tiny_args(family)
    found = rehearsed(family, "low_rank", dtype).block
    assert found == kept_bytes(args, BATCH * SEQ, args.n_heads, dtype.itemsize)
    assert found != kept_bytes(args, BATCH * SEQ, args.n_heads, dtype.itemsize, save_attention=True)
