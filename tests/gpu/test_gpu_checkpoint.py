# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank checkpointing on any device: gradients, what stays alive, what runs again."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.oracle.activations import kept_bytes
from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.recompute import (
    ATTENTION_OPERATORS,
    apply_low_rank_checkpoint,
)

BATCH, SEQ, BLOCKS, HEADS = 2, 32, 3, 4


class Watch(TorchDispatchMode):
    """Counts fused attention, and knows every storage that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention += func in ATTENTION_OPERATORS
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                entry = StorageWeakRef(storage), storage.nbytes()
                self.storages.setdefault(storage._cdata, entry)
        return out

    def bytes_alive(self, outside: set[int]) -> int:
        alive = [(key, size) for key, (ref, size) in self.storages.items() if not ref.expired()]
        return sum(size for key, size in alive if key not in outside)


def gradients(model: LlamaModel, device: torch.device) -> dict[str, Tensor]:
    batch = tokens(model.model_args, BATCH, SEQ).to(device)
    model(batch).square().sum().backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("save_attention", [False, True])
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_gradients(family: str, save_attention: bool, device: torch.device) -> None:
    expected = gradients(build_tiny(family, torch.float64), torch.device("cpu"))
    model = build_tiny(family, torch.float64).to(device)
    apply_low_rank_checkpoint(model, save_attention)
    found = gradients(model, device)
    assert len(found) == len(expected) == len(list(model.parameters()))
    for name, value in found.items():
        plain = expected[name.replace("_checkpoint_wrapped_module.", "")]
        # fp64's rounding, 1e-16, amplified by three blocks whose sums have at most 96 terms.
        assert (value - plain).norm() <= 1e-11 * plain.norm(), name


@pytest.mark.parametrize("save_attention", [False, True])
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_saved_tensors(family: str, save_attention: bool, device: torch.device) -> None:
    """In fp32, whose attention is a fused kernel on both devices."""
    model = build_tiny(family).to(device)
    args = model.model_args
    apply_low_rank_checkpoint(model, save_attention)
    x = torch.ones(BATCH, SEQ, args.dim, device=device, requires_grad=True)
    outside = {t.untyped_storage()._cdata for t in (x, model.freqs_cis, *model.parameters())}
    out, latents = x, None
    with Watch() as watch:
        for block in model.layers.values():
            out, latents = block(out, model.freqs_cis, latents)
        # The first block's input lies outside, and the last one's output is alive instead.
        alive = watch.bytes_alive(outside)
        out.sum().backward()
    kept = BLOCKS * kept_bytes(args, BATCH * SEQ, HEADS, 4, save_attention)
    # A GPU's kernel also returns its random generator's seed and offset, of 8 bytes each.
    assert kept <= alive <= kept + BLOCKS * 16 * save_attention
    assert watch.attention == BLOCKS * (1 if save_attention else 2)
