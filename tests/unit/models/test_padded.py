# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Feed-forwards of an odd width that products pad: losses and gradients stay, bit for bit."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.support.allocations import Noted, ProductsInOrder
from tests.support.parity_runs import add_parity_flavors
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.linears import used_width
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.checkpoint_modes import apply_low_rank_checkpoint

add_parity_flavors()
ODD, PADDED = 37, 64


def trained(family, mode, pads=None):
    """Loss, gradients by name and the widths that products see."""
    args = replace(FLAVORS[family]["parity"], max_seq_len=8, ffn_dim=ODD, vocab_size=48)
    torch.manual_seed(0)
    model = LlamaModel(args)
    for module in model.modules():
        if getattr(module, "pads", False) is None:
            module.pads = pads
    model.init_weights()
    if mode == "low_rank":
        apply_low_rank_checkpoint(model, save_attention=False)
    tokens = torch.randint(args.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    widths = set()

    def note(func, args, result):
        if func is torch.ops.aten.mm.default:
            widths.update(*(x.shape for x in (*args, result)))

    with ProductsInOrder(), Noted(note) if mode == "eager" else nullcontext():
        loss = model(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), gradients, widths


@pytest.mark.parametrize(
    ("family", "mode"), [*((family, "eager") for family in FAMILIES), ("cola", "low_rank")]
)
def test_padding_changes_nothing(family, mode):
    loss, gradients, widths = trained(family, mode)
    padded_loss, padded_gradients, padded_widths = trained(family, mode, pads=True)
    assert torch.equal(padded_loss, loss)
    for name, gradient in gradients.items():
        assert torch.equal(padded_gradients[name], gradient), name
    if mode == "eager":  # the control: something was padded, and nothing was left
        assert ODD in widths and ODD not in padded_widths and PADDED in padded_widths


def test_an_even_width_and_an_evaluation_stay():
    odd = torch.empty(5461, 1)
    even = [used_width(torch.empty(width, 1), pads=True) for width in (5472, 344)]
    assert even == [5472, 344]
    assert [used_width(odd, pads) for pads in (True, False)] == [5472, 5461]
    with torch.no_grad():
        assert used_width(odd, pads=True) == 5461
    assert used_width(odd, pads=None) == 5461  # on a CPU
