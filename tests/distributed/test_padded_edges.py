# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Two ranks whose share of the feed-forward's width is odd: padded products give equal bits."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.allocations import Noted, ProductsInOrder
from tests.support.nightly import nightly
from tests.support.parity_cases import BATCH, TOKENS, Case, model_args, tp_mesh
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel

SHARE, PADDED = 37, 64
CASES = {
    "btp": Case(settings=TPSettings("btp")),
    "btp alone": Case("svd", TPSettings("btp", grouping=False)),
    "btp sequence": Case("lax", TPSettings("btp", comm="sequence")),
    "megatron": Case("full", TPSettings("megatron")),
    "megatron sequence": Case("full", TPSettings("megatron", comm="sequence")),
}


def trained(case: Case, pads: bool, checkpoints: bool) -> tuple[list[Tensor], set[int]]:
    """Loss and gradients of this rank, and the sizes of what its products are given."""
    torch.manual_seed(0)
    model = LlamaModel(replace(model_args(case), ffn_dim=SHARE * case.degree))
    model.init_weights()
    apply_tensor_parallel(model, tp_mesh(case.degree), case.settings)
    for module in model.modules():
        if getattr(module, "pads", False) is None:
            module.pads = pads
    if checkpoints:
        apply_low_rank_checkpoint(model, save_attention=False)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.model_args.vocab_size, (BATCH, TOKENS), generator=generator)
    sizes: set[int] = set()

    def note(func: object, args: tuple[Tensor, ...], result: object) -> None:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            sizes.update(size for x in args for size in x.shape)

    with ProductsInOrder(), nullcontext() if checkpoints else Noted(note):
        loss = model(tokens, targets=tokens)
        loss.backward()
    return [loss.detach(), *(local_part(p.grad) for p in model.parameters())], sizes


@pytest.mark.parametrize("name", ["btp", "megatron", *nightly("btp alone", *list(CASES)[2:])])
def test_padding_changes_no_bit(name: str, two_ranks: RankPool) -> None:
    case = CASES[name]
    for checkpoints in (False, True) if case.family == "cola" else (False,):
        plain, padded = (two_ranks.run(trained, case, on, checkpoints) for on in (False, True))
        for (ours, sizes), (theirs, odd) in zip(padded, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            if not checkpoints:  # the control: something was padded
                assert SHARE in odd and SHARE not in sizes and PADDED in sizes
