# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What checkpointing keeps and repeats, and which blocks it wraps."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from tests.support.checkpointing import checkpointing
from tests.support.nightly import nightly
from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.config.schema import AC_MODES
from torchtitan_lr.models.low_rank_checkpoint import Recomputation, keep
from torchtitan_lr.parallel.checkpoint_modes import EAGER_MODES, apply_activation_checkpoint
from torchtitan_lr.parallel.parallelize import apply_compile
from torchtitan_lr.titan.base import ActivationCheckpoint


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Product(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        def compute():
            Product.calls += 1
            return (x @ weight,)

        ctx.save_for_backward(weight)
        return keep(compute)[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].T, None


def test_parts_of_a_saved_tensor() -> None:
    """As grouped latents are: saved as one, used in parts, of which sin saves its argument."""
    weight = draw(4, 6, seed=0)

    def function(x: Tensor) -> Tensor:
        first, second = Product.apply(x, weight).split([2, 4], dim=-1)
        return first.sin().sum() + second.T.sin().square().sum()

    def checkpointed(x: Tensor) -> Tensor:
        return Recomputation(function, (x,), {}).forward()

    x = draw(3, 4, seed=1)
    gradients = []
    for run in (function, checkpointed):
        leaf = x.clone().requires_grad_()
        Product.calls = 0
        loss = run(leaf)
        for _ in range(2):  # as a split backward does
            leaf.grad = None
            loss.backward(retain_graph=True)
        gradients.append(leaf.grad)
        assert Product.calls == 1
    assert torch.equal(*gradients)
    # By hand: d sin = cos, d sin² = 2 sin cos = sin(2 ·).
    h = x @ weight
    exact = torch.cat([h[:, :2].cos(), (2 * h[:, 2:]).sin()], -1) @ weight.T
    assert torch.allclose(gradients[1], exact, rtol=1e-12, atol=1e-12)  # fp64, sums of six


def test_a_backward_in_parts_recomputes_once() -> None:
    """As the weights' half of a split backward, which is one call of autograd per linear."""
    calls = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() + y.sin()

    x, y = (draw(3, 4, seed=i).requires_grad_() for i in (1, 2))
    out = Recomputation(function, (x, y), {}).forward().sum()
    found = [torch.autograd.grad(out, part, retain_graph=True)[0] for part in (x, y)]
    assert torch.equal(found[0], x.cos()) and torch.equal(found[1], y.cos())
    assert len(calls) == 2


def test_a_change_in_place_is_refused() -> None:
    def function(x: Tensor) -> Tensor:
        h = Product.apply(x, draw(4, 6, seed=0))
        out = h.sin()
        h.detach().mul_(2)
        return out.sum()

    x = draw(3, 4, seed=1).requires_grad_()
    loss = Recomputation(function, (x,), {}).forward()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_every_mode_has_its_name_in_the_schema() -> None:
    assert sorted((*EAGER_MODES, "memory_budget")) == sorted(AC_MODES)


EVERY_SECOND = SimpleNamespace(
    activation_checkpoint=ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    compile=SimpleNamespace(enable=False, components=[]),
    job=SimpleNamespace(dump_folder=""),
)


def wrapped(model):
    return [name for name, block in model.layers.items() if isinstance(block, CheckpointWrapper)]


@pytest.mark.parametrize(
    ("held", "expected"), [("0123", ["1", "3"]), ("123", ["1", "3"]), ("23", ["3"])]
)
def test_a_stage_wraps_the_blocks_that_the_whole_model_wraps(held, expected):
    for _ in range(2):  # whatever this process has built before
        model = build_tiny("cola", n_layers=4)
        for name in set("0123") - set(held):
            del model.layers[name]
        apply_activation_checkpoint(model, EVERY_SECOND)
        assert wrapped(model) == expected


def passed(family, dtype, keeps):
    """Output, gradients and the bytes that blocks keep for backward; compiled in bf16."""
    torch.compiler.reset()
    model, kept = build_tiny(family, dtype, n_layers=2), {}
    x = model.tok_embeddings(tokens(model.model_args)).detach().requires_grad_()
    outside = {leaf.data_ptr() for leaf in (*model.layers.parameters(), model.freqs_cis)}

    def pack(saved: Tensor) -> Tensor:
        if saved.data_ptr() not in outside:
            kept[saved.data_ptr()] = saved.nbytes
        return saved

    checkpointing("none kept" if keeps else "none")(model)
    if dtype == torch.bfloat16:
        apply_compile(model, "inductor", keeps)
    out, latents = x, None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        for block in model.layers.values():
            out, latents = block(out, model._rows(None, None, dtype), latents)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.layers.parameters())], sum(kept.values())


FAMILIES = ("svd", "cola", "lax")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *nightly(*((family, torch.bfloat16) for family in FAMILIES)),
    ],
)
def test_kept_inputs_change_no_bit(family, dtype):
    (made, less), (kept, more) = (passed(family, dtype, keeps) for keeps in (False, True))
    assert all(a.equal(b) for a, b in zip(made, kept, strict=True))
    assert more > 1.05 * less
