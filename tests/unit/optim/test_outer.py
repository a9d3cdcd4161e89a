# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Outer steps of replicas against the equations, and coded messages against plain numpy."""

import numpy as np
import pytest
import torch

from torchtitan_lr.config.schema import Outer
from torchtitan_lr.optim.outer import (
    BLOCK,
    OuterSteps,
    coded_bytes,
    decode,
    due_after,
    encode,
    layer_fragments,
)


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
    assert list(layer_fragments(names, 6, 3).values()) == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_steps_are_those_of_sgd(bits, nesterov):
    """Torch's SGD with the changes as gradients."""
    source = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(300, generator=source, dtype=torch.float64)

    weight = torch.nn.Parameter(draw())
    twin = torch.nn.Parameter(weight.detach().clone())
    sgd = torch.optim.SGD([twin], lr=0.7, momentum=0.8, nesterov=nesterov)
    outer = OuterSteps({"w": weight}, 1, Outer(every=3, bits=bits, nesterov=nesterov))
    owed = torch.zeros_like(twin)
    for step in range(1, 13):
        weight.data.add_(draw(), alpha=1e-2)
        before = weight.detach().clone()
        assert outer.after(step)
        if step % 3:
            assert torch.equal(weight, before)
            continue
        change = twin.detach() - before + owed
        sent = change if bits == 32 else torch.from_numpy(rounded(change.numpy(), bits))
        owed = change - sent
        twin.grad = sent
        sgd.step()
        torch.testing.assert_close(weight.detach(), twin.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bits", [32, 4])
def test_a_message_that_overlaps_arrives_a_step_later(bits):
    """Torch's SGD on the changes; what a step changes meanwhile stays."""
    source = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300, generator=source, dtype=torch.float64))
    twin = torch.nn.Parameter(weight.detach().clone())
    sgd = torch.optim.SGD([twin], lr=0.7, momentum=0.8, nesterov=True)
    outer = OuterSteps({"w": weight}, 1, Outer(every=3, bits=bits, overlap=True))
    owed, sent, expected = torch.zeros_like(twin), twin, weight.detach().clone()
    for step in range(1, 14):
        inner = 1e-2 * torch.randn(300, generator=source, dtype=torch.float64)
        weight.data += inner
        expected += inner
        if step > 3 and step % 3 == 1:
            twin.grad = sent
            sgd.step()
            expected = twin.detach() + inner
        last = step == 13
        if step % 3 == 0 or last:
            change = twin.detach() - expected + owed
            sent = change if bits == 32 else torch.from_numpy(rounded(change.numpy(), bits))
            owed = change - sent
        if last:
            twin.grad = sent
            sgd.step()
            expected = twin.detach()
        if step == 9:  # a resumed run: another object with what was saved
            assert outer.after(step) and not outer.together
            kept, outer = outer, OuterSteps({"w": weight}, 1, outer.section)
            outer.common, outer.momentum = kept.common, kept.momentum
            outer.residual, outer.together = kept.residual, False
            outer.resume(step)
        else:
            assert outer.after(step, last=last)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-9)
    assert outer.together and torch.equal(weight, outer.common["w"])


def test_what_is_not_finite_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(4))
    outer = OuterSteps({"w": weight}, 1, Outer(every=3))
    weight.data[1] = torch.inf
    assert not outer.after(3)
    assert outer.common["w"].eq(1).all() and outer.momentum["w"].eq(0).all()
    assert weight.tolist() == [1, torch.inf, 1, 1]
