# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What compiled forward passes keep."""

import pytest
import torch

from tests.unit.compat.doors import changed
from tests.unit.tiny import build_tiny
from torchtitan_lr.compat.compiler import remake_inputs_of_products
from torchtitan_lr.models.llama import build_freqs_cis

B, S = 2, 8


def kept(family, enabled):
    """Numbers that a compiled block keeps for backward, its weights aside, and its gradients."""
    model = build_tiny(family, torch.float64)
    block = model.layers["0"]
    table = torch.view_as_real(build_freqs_cis(12, S, 1e4, None, torch.float64))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, 48, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.compiler.reset()
    remake_inputs_of_products(enabled)
    try:
        # Inductor's partition of forward and backward, without its kernels.
        compiled = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
        saved = {}

        def pack(t):
            saved[t.untyped_storage()._cdata] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = compiled(x, table)[0]
        gradients = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    finally:
        remake_inputs_of_products(False)
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    return sum(
        t.untyped_storage().nbytes() for a, t in saved.items() if a not in weights
    ), gradients


@pytest.mark.nightly  # where every torch is tested
def test_inputs_of_products_are_made_again():
    less, ours = kept("cola", True)
    more, theirs = kept("cola", False)  # the control: torch's default
    # At least the product of SwiGLU and σ(h) of five bottlenecks.
    numbers = B * S * (80 + 4 * 12 + 20)
    assert more - less >= 8 * numbers, changed(
        "ban_recompute_materialized_backward", "compiler.remake_inputs_of_products"
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
