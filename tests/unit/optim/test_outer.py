# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Outer steps of replicas against the equations, and coded messages against plain numpy."""

import numpy as np
import pytest
import torch

from torchtitan_lr.config.schema import Outer
from torchtitan_lr.optim.outer import BLOCK, OuterSteps, coded_bytes, decode, due_after, encode
from torchtitan_lr.optim.outer import layer_fragments as fragments_of


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Whole multiples of a block's largest magnitude over 2ᵇ⁻¹ - 1, in fp64."""
    found = np.empty_like(x)
    most = 2 ** (bits - 1) - 1
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        scale = np.float32(np.abs(block).max()) / np.float32(most)
        found[start : start + BLOCK] = np.rint(block / scale) * scale if scale else 0
    return found


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("entries", [1, BLOCK, 1000])
def test_messages(bits, entries):
    x = np.random.default_rng(bits).standard_normal(entries) * 1e-3
    x[BLOCK : 2 * BLOCK] = 0
    message = encode(torch.from_numpy(x), bits)
    assert message.dtype == torch.uint8 and len(message) == coded_bytes(entries, bits)
    found = decode(message, entries, bits).double().numpy()
    np.testing.assert_allclose(found, rounded(x, bits), rtol=1e-6, atol=0)
    for start in range(0, entries, BLOCK):
        block = slice(start, start + BLOCK)
        bound = np.abs(x[block]).max() / (2 ** (bits - 1) - 1) / 2
        assert np.abs(found[block] - x[block]).max() <= bound * (1 + 1e-6)


def test_fragments_are_due_in_turns():
    due = {step: due_after(step, 30, 3) for step in range(1, 61) if due_after(step, 30, 3)}
    assert due == {10: [1], 20: [2], 30: [0], 40: [1], 50: [2], 60: [0]}
    names = ["tok_embeddings.weight", *(f"layers.{i}.w.weight" for i in range(6)), "norm.weight"]
    assert list(fragments_of(names, 6, 3).values()) == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_outer_steps_are_those_of_sgd(bits, nesterov, overlap):
    """Torch's SGD with the changes as gradients; what a step changes meanwhile stays."""
    source = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300, generator=source, dtype=torch.float64))
    twin = torch.nn.Parameter(weight.detach().clone())
    sgd = torch.optim.SGD([twin], lr=0.7, momentum=0.8, nesterov=nesterov)
    outer = OuterSteps({"w": weight}, 1, Outer(3, bits=bits, nesterov=nesterov, overlap=overlap))
    owed, expected = torch.zeros_like(twin), weight.detach().clone()
    for step in range(1, 14):
        inner = 1e-2 * torch.randn(300, generator=source, dtype=torch.float64)
        inner *= step != 7  # a rejected step, after which the replica has the common weights
        weight.data += inner
        expected += inner
        if twin.grad is not None:  # sent a step ago
            sgd.step()
            twin.grad, expected = None, twin.detach() + inner
        if step % 3 == 0 or step == 13:
            change = twin.detach() - expected + owed
            twin.grad = change if bits == 32 else torch.from_numpy(rounded(change.numpy(), bits))
            owed = change - twin.grad
            if step == 13 or not overlap:
                sgd.step()
                twin.grad, expected = None, twin.detach().clone()
        if overlap and step == 9:  # a resumed run: another object with what was saved
            assert outer.after(step) and not outer.together
            kept, outer = outer, OuterSteps({"w": weight}, 1, outer.section)
            outer.common, outer.momentum = kept.common, kept.momentum
            outer.residual, outer.together = kept.residual, False
            outer.resume(step)
        else:
            assert outer.after(step, last=step == 13)
        assert step != 7 or torch.equal(weight, outer.common["w"])
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-8)
    assert outer.together and torch.equal(weight, outer.common["w"])


def test_what_is_not_finite_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(4))
    outer = OuterSteps({"w": weight}, 1, Outer(every=3))
    weight.data[1] = torch.inf
    assert not outer.after(3)
    assert outer.common["w"].eq(1).all() and outer.momentum["w"].eq(0).all()
    assert weight.tolist() == [1, torch.inf, 1, 1]
