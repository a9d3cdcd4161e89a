# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank checkpointing on one device: the memory it promises, and what it computes again."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.oracle.activations import kept_bytes, recompute_flops
from tests.support.allocations import Allocations
from tests.unit.tiny import build_tiny
from torchtitan_lr.costs.rehearsal import fake_ranks
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models import low_rank_checkpoint
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel, Rows
from torchtitan_lr.models.low_rank_checkpoint import Recomputation
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel

BATCH, SEQ = 2, 32
TOKENS = BATCH * SEQ


def build(family: str = "cola", n_kv_heads: int = 2) -> LlamaModel:
    sizes = {"dim": 64, "ffn_dim": 160, "rank_attention": 16, "rank_ffn": 24}
    return build_tiny(family, n_kv_heads=n_kv_heads, **sizes)


def test_another_path_in_backward_is_refused() -> None:
    model = build()
    apply_low_rank_checkpoint(model, False)
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(torch.zeros(BATCH, SEQ, dtype=torch.long)).sum()
    with pytest.raises(RuntimeError, match="such as sdpa_kernel"):
        loss.backward()


def saved_bytes(model: LlamaModel) -> int:
    """Run the blocks forward; return the bytes that outlive it, without parameters and buffers."""
    x = torch.ones(BATCH, SEQ, 64, dtype=next(model.parameters()).dtype, requires_grad=True)
    outside = [x, model.freqs_cis, *model.parameters()]
    allocations, out, latents = Allocations(), x, None
    with allocations:
        for block in model.layers.values():
            out, latents = block(out, Rows(model.freqs_cis), latents)
    # The first block's input lies outside, and the last one's output is alive instead.
    return allocations.bytes_alive({t.untyped_storage()._cdata for t in outside})


@pytest.mark.parametrize(
    ("family", "save_attention", "dtype"),
    [
        ("svd", True, torch.float32),
        ("cola", False, torch.float32),
        ("lax", False, torch.float32),
        # The log-sum-exp is as wide as an fp64 activation and wider than a bf16 one.
        ("cola", True, torch.float64),
        ("cola", True, torch.bfloat16),
    ],
)
def test_saved_bytes(family: str, save_attention: bool, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    everything = saved_bytes(model)
    apply_low_rank_checkpoint(model, save_attention)
    kept = kept_bytes(model.model_args, TOKENS, 4, dtype.itemsize, save_attention)
    recorded, followed = saved_bytes(model), saved_bytes(model)
    assert recorded == followed == 3 * kept < everything / 3


def test_published_factors() -> None:
    """CoLA, Eq. 18 and Table 4, in units of ndr: 18.5 is printed, 18.0 follows at d_ff = 2.5 d."""
    d, r, n = 1024, 256, 64
    for ffn_dim, factor in ((2560, 18.0), (2736, 8 + 4 * 2736 / 1024)):
        args = LlamaArgs(dim=d, ffn_dim=ffn_dim, n_heads=16, rank_attention=r, rank_ffn=r)
        assert recompute_flops(args, n, save_attention=True) == factor * n * d * r
        assert recompute_flops(args, n) == factor * n * d * r + 4 * n * n * d
        assert kept_bytes(args, n, 16, 2) == 2 * (n * d + 7 * n * r)


def sent_by_one_rank(settings: TPSettings) -> tuple[int, int]:
    """Collectives of a forward pass, and of a block that one rank alone recomputes after it."""
    made: list[Recomputation] = []

    class Seen(Recomputation):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    # The other rank does not answer: a real one that is not there would be waited for.
    with fake_ranks(2) as mesh, patch.object(low_rank_checkpoint, "Recomputation", Seen):
        assert mesh is not None
        model = build()
        apply_tensor_parallel(model, mesh, settings)
        apply_low_rank_checkpoint(model, False)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        calls = []
        with CommLedger([model], {"tp": mesh.get_group()}) as ledger:
            model(tokens, targets=tokens)
            calls.append(sum(row["calls"] for row in ledger.rows()))
            ledger.clear()
            assert made[1].saved_tensor(0).numel() > 0  # as autograd asks for what it saved
            calls.append(sum(row["calls"] for row in ledger.rows()))
    assert len(made) == len(model.layers)
    return calls[0], calls[1]


@pytest.mark.parametrize(
    "settings",
    [
        TPSettings("btp"),
        TPSettings("btp", norm="sync"),
        TPSettings("btp", comm="sequence"),
        # The control: there the tensors behind the collectives are d-wide, and are not saved.
        TPSettings("vanilla"),
    ],
    ids=str,
)
def test_one_rank_may_recompute_alone(settings: TPSettings) -> None:
    """No rank waits for another in a recomputation, so that ranks cannot wait for each other."""
    forward, again = sent_by_one_rank(settings)
    assert forward > 12 and (again == 0) == (settings.plan == "btp")
