# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Recorded kernels against the closed formulas, and the time of kernels by hand."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.oracle.activations import recompute_flops
from tests.oracle.flops import head_flops, layer_flops
from tests.support.nightly import nightly
from torchtitan_lr.costs.kernels import KernelRecorder, Product
from torchtitan_lr.costs.rehearsal import Workload
from torchtitan_lr.costs.work import rehearse_work
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import resolve_settings
from torchtitan_lr.parallel.recompute import apply_low_rank_checkpoint

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 96}


def args_of(family):
    ranks = {} if family == "full" else {"rank_attention": 16, "rank_ffn": 16}
    extra = {"activation": "fullrank"} if family in ("svd", "full") else {}
    return LlamaArgs(**SHAPE, vocab_size=256, max_seq_len=32, family=family, **ranks, **extra)


def recorded(family, plan="auto", tp=1, fused=False, prepare=None):
    args = args_of(family)
    settings = resolve_settings(TPSettings(plan), args, tp, 32) if tp > 1 else TPSettings()
    return rehearse_work(Workload(args, settings, tp, 2, 32, torch.bfloat16), fused, prepare)


def flops(work):
    return sum(product.flops * calls for product, calls in work.products.items())


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
    work, args = recorded(family, plan, tp), args_of(family)
    block, head = layer_flops(args, 32), head_flops(args, 32)
    linears = block.attention_linears + block.feed_forward
    for passed, third in zip(work.block, (1, 2), strict=True):
        assert flops(passed) == pytest.approx(2 * third * linears / 3 / tp)
    for passed, third in zip(work.ends, (1, 2), strict=True):
        assert flops(passed) == pytest.approx(2 * third * head / 3 / tp)
    # Below the diagonal is half; backward computes the scores again: five products to two.
    shared = 1 if plan == "vanilla_replicated" else tp
    half = 2 * block.attention_scores / 3 / 2 / shared
    assert work.block[0].attention == pytest.approx(half)
    assert work.block[1].attention == pytest.approx(2.5 * half)


@pytest.mark.parametrize(
    ("family", "tp"),
    [("svd", 1), ("cola", 2), ("lax", 2), *nightly(("svd", 2), ("cola", 1), ("lax", 1))],
)
def test_low_rank_checkpointing_repeats_no_product_for_nothing(family, tp):
    """All up-projections but the last of a block, under BTP as on one rank."""
    prepare = partial(apply_low_rank_checkpoint, save_attention=True)
    plain = recorded(family, "btp", tp).block
    repeating = recorded(family, "btp", tp, prepare=prepare).block
    assert flops(repeating[0]) == flops(plain[0])
    expected = 2 * recompute_flops(args_of(family), 32, save_attention=True, tp_degree=tp)
    assert flops(repeating[1]) - flops(plain[1]) == expected


def test_bytes_by_hand():
    """SiLU reads and writes x; the product reads two and writes one; views move nothing."""
    x, z, w = torch.randn(10, 100), torch.randn(10, 100), torch.randn(100, 8)
    with KernelRecorder() as recorder:
        ((F.silu(x) * z).view(10, 100) @ w).t()
    eager, fused = recorder.work(False, fused=False), recorder.work(False, fused=True)
    assert eager.products == fused.products == Counter({Product(1, 10, 8, 100, 4): 1})
    assert (eager.traffic, eager.kernels) == (5 * 4000, 3)
    assert (fused.traffic, fused.kernels) == (3 * 4000, 2)
    assert recorder.work(True, fused=True).kernels == 0
