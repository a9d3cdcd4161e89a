# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Attention of every rank that shares a row, on any device, against whole attention in fp64."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.compat.prefix_attention import prefix_attention
from torchtitan_lr.models.llama import LlamaModel, separate
from torchtitan_lr.parallel import context
from torchtitan_lr.parallel.checkpoint_modes import apply_activation_checkpoint
from torchtitan_lr.parallel.context import (
    apply_context_parallel,
    attend_from_chunks,
    attend_to_prefix,
    own_chunks,
)
from torchtitan_lr.parallel.parallelize import apply_compile

RANKS = 4
B, HEADS, S, WIDTH = 2, 4, 256, 32


def limit(dtype: torch.dtype) -> float:
    """Of |error| / |expected|: bf16 rounds inputs, probabilities and results by 2⁻⁹ each."""
    return 1e-12 if dtype == torch.float64 else 2.0**-6


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().cpu().double() - theirs.detach()).norm() / theirs.detach().norm())


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A GPU's attention to a prefix, with a CPU's kernel on a CPU."""
    out: Tensor = prefix_attention(q, k, v)[0]
    return out


@pytest.mark.parametrize(
    ("kv_heads", "masked", "to_prefix"),
    [
        *((heads, masked, attend_to_prefix) for heads in (HEADS, 2) for masked in (False, True)),
        (HEADS, False, fused),  # a CPU's kernel knows no grouped queries
    ],
)
def test_ranks_together(
    kv_heads: int, masked: bool, to_prefix: Callable[..., Tensor], device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    generator = torch.Generator().manual_seed(4)
    shapes = [(B, heads, S, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    *exact, upstream = (x.double() for x in drawn)
    documents = torch.arange(S).expand(B, S) // 100 if masked else torch.zeros(B, S)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    exact = [x.requires_grad_() for x in exact]
    whole = F.scaled_dot_product_attention(*exact, attn_mask=seen, enable_gqa=True)
    expected = torch.autograd.grad(whole, exact, upstream)

    inputs = [x.to(device).requires_grad_() for x in drawn[:3]]
    q, k, v = inputs
    total = [torch.zeros_like(x, dtype=torch.float64) for x in expected]
    for ranks in (Ranks(size=RANKS, rank=i) for i in range(RANKS)):
        places = own_chunks(torch.arange(S).expand(B, S), ranks, 1).to(device)
        mask = separate(documents.long().to(device), dtype, places)[1] if masked else None
        out = attend_from_chunks(own_chunks(q, ranks, -2), k, v, mask, ranks, to_prefix)
        exactly = limit(dtype) if device.type == "cuda" else 1e-15
        assert difference(out, own_chunks(whole, ranks, -2)) < exactly
        own_upstream = own_chunks(upstream.to(device, dtype), ranks, -2)
        gradients = torch.autograd.grad(out, inputs, own_upstream)
        total = [t + g.cpu().double() for t, g in zip(total, gradients, strict=True)]
    for ours, theirs in zip(total, expected, strict=True):
        assert difference(ours, theirs) < exactly
    # The control: attention of the early chunk alone to a prefix of another length.
    wrong = attend_from_chunks(own_chunks(q, Ranks(size=RANKS), -2), k, v, None, ranks)
    assert difference(wrong, own_chunks(whole, Ranks(size=RANKS), -2)) > 0.1


def train(model: LlamaModel, device: torch.device, **arguments: Tensor) -> Iterator[Tensor]:
    rows = tokens(model.model_args, s=32).to(device)
    arguments = {name: value.to(device) for name, value in arguments.items()}
    loss = model(rows, targets=rows, **arguments)
    yield loss
    loss.backward()
    yield from (parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("how", ["eager", "fused", "latents", "low_rank", "compiled"])
def test_what_is_gathered_does_not_stay(
    how: str, masked: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a rank alone, which gathers its own row: blocks as in training, and no group."""
    if how == "compiled" and device.type == "cpu":
        pytest.skip("takes long, and tests/distributed/test_layout.py compiles on a CPU")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    documents = {"documents": (torch.arange(32) // 20).expand(2, 32)} if masked else {}
    shape = {"dim": 128, "n_kv_heads": 4 if how == "fused" else 2}
    expected = list(
        train(build_tiny("cola", torch.float64, **shape), torch.device("cpu"), **documents)
    )

    if how == "fused":
        monkeypatch.setattr(context.GatheredAttention, "to_prefix", staticmethod(fused))
    model = build_tiny("cola", torch.float64, **shape).to(device, dtype)
    apply_context_parallel(model, Ranks(), "latents" if how == "latents" else "kv")
    if how == "low_rank":
        section = SimpleNamespace(mode="low_rank", low_rank_save_attention=True)
        apply_activation_checkpoint(model, SimpleNamespace(activation_checkpoint=section))
    if how == "compiled":
        apply_compile(model, "inductor")
    gathered: list[StorageWeakRef] = []

    def watched(x: Tensor, ranks: Ranks) -> Tensor:
        row = gather(x, ranks)
        if how != "compiled":
            gathered.append(StorageWeakRef(row.untyped_storage()))
        return row

    def attend_watched(q: Tensor, k: Tensor, *others: Any) -> Tensor:
        if how == "latents":  # else it is what was gathered
            gathered.append(StorageWeakRef(k.untyped_storage()))
        return attend(q, k, *others)

    places = torch.arange(32).expand(2, 32)
    blocks = len(model.layers)
    gather, attend = context.gather_row, context.attend_from_chunks
    blocks *= 2 if how == "latents" else 1
    with (
        patch.object(context, "gather_row", watched),
        patch.object(context, "attend_from_chunks", attend_watched),
    ):
        run = train(model, device, places=places, **documents)
        found = [next(run)]
        if how != "compiled":
            assert [x.expired() for x in gathered] == [True] * blocks
        found += list(run)
    assert len(gathered) == (0 if how == "compiled" else 2 * blocks)
    for ours, theirs in zip(found, expected, strict=True):
        assert difference(ours, theirs) < 4 * limit(dtype)


def test_a_kernel_that_does_not_fit_is_refused(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU has a kernel for every dtype")
    q = torch.randn(1, HEADS, S, WIDTH, device=device)  # fp32
    with pytest.raises(RuntimeError, match=r"[Ff]lash"):
        attend_from_chunks(q, q, q, None, Ranks(size=2))
