# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Blocks rehearsed without data: memory against real ones, kernels against formulas."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

from tests.oracle.activations import recompute_flops
from tests.oracle.flops import head_flops, layer_flops
from tests.support.allocations import Allocations
from tests.support.checkpointing import checkpointing
from tests.support.nightly import nightly
from tests.unit.tiny import build_tiny, tiny_args
from torchtitan_lr.costs.kernels import Recorder, Work, product_work
from torchtitan_lr.costs.rehearsal import Workload, rehearse
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import resolve_settings

BATCH, SEQ, LAYERS = 2, 16, 4
# The modes once, and the families where the blocks differ: LaX carries latents, full has none.
CASES = [("cola", mode) for mode in ("selective 2", "low_rank", "none kept")]
CASES += [("full", "none"), *nightly(("lax", "low_rank"), ("cola", "none"), ("cola", "full"))]
CONTROL = {"cola": "full", "lax": "low_rank", "full": "full"}


@cache
def rehearsed(family, mode):
    period = 2 if mode == "selective 2" else 1
    workload = Workload(tiny_args(family), TPSettings("btp"), 1, BATCH, SEQ, torch.float32)
    return rehearse(workload, checkpointing(mode), period)


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
    if mode in ("none", "none kept"):
        assert estimate == packed
    # The control: what another mode keeps is another number.
    other = rehearsed(family, "none" if mode != "none" else CONTROL[family])
    assert LAYERS * other.block + other.ends != pytest.approx(alive, rel=0.05)


def test_memory_falls_with_the_ranks_of_a_row():
    """Kept is 1/C of it; at work is a block's k and v, their gradients, and one copy more."""
    args = replace(FLAVORS["cola"]["debug"], n_kv_heads=8)  # d_kv 128, r 32
    alone, kv, latents = (
        rehearse(Workload(args, TPSettings("btp"), 1, 2, 512, torch.bfloat16, *shared))
        for shared in ((1, "kv"), (4, "kv"), (4, "latents"))
    )
    side_by_side = 2 * 128 * 128 * 2  # attention's output of both chunks, beside each
    assert kv.block == alone.block / 4 + side_by_side
    own_keys = 2 * 2 * 128 * 128 * 2  # k and v of 2 · 512 / 4 tokens, d_kv 128
    assert latents.block == kv.block - own_keys
    whole = 2 * 4 * 256 * 128 * 2  # bytes of k and v of all ranks' tokens
    for found in (kv, latents):
        assert whole / 2 < found.working - alone.working / 4 < 4 * whole


SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}


def args_of(family):
    ranks = {} if family == "full" else {"rank_attention": 16, "rank_ffn": 16}
    extra = {"activation": "fullrank"} if family in ("svd", "full") else {}
    return LlamaArgs(**SHAPE, vocab_size=256, max_seq_len=32, family=family, **ranks, **extra)


def recorded(family, plan="auto", tp=1, prepare=None):
    args = args_of(family)
    settings = resolve_settings(TPSettings(plan), args, tp, 32) if tp > 1 else TPSettings()
    return rehearse(Workload(args, settings, tp, 2, 32, torch.bfloat16), prepare)


@pytest.mark.parametrize(
    ("family", "plan", "tp"),
    [
        ("full", "auto", 1),
        ("full", "auto", 2),
        ("cola", "auto", 1),
        ("lax", "btp", 2),
        ("cola", "vanilla", 2),
        ("cola", "vanilla_replicated", 2),
    ],
)
def test_recorded_products_have_the_formulas_flops(family, plan, tp):
    found, args = recorded(family, plan, tp), args_of(family)
    block, head = layer_flops(args, 32), head_flops(args, 32)
    linears = block.attention_linears + block.feed_forward
    for passed, third in zip(found.block_work, (1, 2), strict=True):
        assert passed.flops == pytest.approx(2 * third * linears / 3 / tp)
    for passed, third in zip(found.ends_work, (1, 2), strict=True):
        assert passed.flops == pytest.approx(2 * third * head / 3 / tp)
    # Below the diagonal is half; backward computes the scores again: five products to two.
    shared = 1 if plan == "vanilla_replicated" else tp
    half = 2 * block.attention_scores / 3 / 2 / shared
    heads = args.head_dim, 32
    assert found.block_work[0].attention == {heads: pytest.approx(half)}
    assert found.block_work[1].attention == {heads: pytest.approx(2.5 * half)}


@pytest.mark.parametrize(
    ("family", "tp"),
    [("svd", 1), ("cola", 2), ("lax", 2), *nightly(("svd", 2), ("cola", 1), ("lax", 1))],
)
def test_low_rank_checkpointing_repeats_no_product_for_nothing(family, tp):
    """All up-projections but the last of a block, under BTP as on one rank."""
    prepare = partial(apply_low_rank_checkpoint, save_attention=True)
    plain = recorded(family, "btp", tp).block_work
    repeating = recorded(family, "btp", tp, prepare).block_work
    assert repeating[0].flops == plain[0].flops
    expected = 2 * recompute_flops(args_of(family), 32, save_attention=True, tp_degree=tp)
    assert repeating[1].flops - plain[1].flops == expected


def test_bytes_by_hand():
    """SiLU reads and writes x; the product reads two and writes one; views move nothing."""
    x, z, w = torch.randn(10, 100), torch.randn(10, 100), torch.randn(100, 8)
    with Recorder() as recorder:
        ((F.silu(x) * z).view(10, 100) @ w).t()
    eager, fused = recorder.work(False, fused=False), recorder.work(False, fused=True)
    product = product_work(1, 10, 8, 100, 4)
    assert product.products == {(2 * 10 * 8 * 100, 4 * (10 * 100 + 100 * 8 + 10 * 8)): 1}
    assert eager == product.plus(Work(traffic=5 * 4000, kernels=2))
    assert fused == product.plus(Work(traffic=3 * 4000, kernels=1))
    assert recorder.work(True, fused=True).kernels == 0
