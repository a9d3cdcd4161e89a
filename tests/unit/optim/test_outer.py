# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Outer steps of replicas against the equations, and coded messages against plain numpy."""

import copy

import numpy as np
import pytest
import torch

from torchtitan_lr.config.schema import Outer
from torchtitan_lr.console.log import console
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.optim.outer import BLOCK, OuterSteps, coded_bytes, decode, due_after, encode
from torchtitan_lr.optim.outer import layer_fragments as fragments_of
from torchtitan_lr.titan.components import MODEL, ModelWrapper
from torchtitan_lr.training.outer_states import OuterStates


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Whole multiples of a block's largest magnitude over 2ᵇ⁻¹ - 1, in fp64."""
    blocks = np.pad(x, (0, -len(x) % BLOCK)).reshape(-1, BLOCK)
    largest = np.abs(blocks).max(1, keepdims=True).astype(np.float32)
    scale = largest / np.float32(2 ** (bits - 1) - 1)
    return (np.rint(blocks / np.where(scale, scale, 1)) * scale).flatten()[: len(x)]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("blocks", [1, 8])
def test_messages(bits, blocks):
    x = np.random.default_rng(bits).standard_normal(blocks * BLOCK) * 1e-3
    x[BLOCK : 2 * BLOCK] = 0
    message = encode(torch.from_numpy(x), bits)
    assert message.dtype == torch.uint8 and len(message) == coded_bytes(len(x), bits)
    found = decode(message, bits).double().numpy()
    np.testing.assert_allclose(found, rounded(x, bits), rtol=1e-6, atol=0)
    for start in range(0, len(x), BLOCK):
        block = slice(start, start + BLOCK)
        bound = np.abs(x[block]).max() / (2 ** (bits - 1) - 1) / 2
        assert np.abs(found[block] - x[block]).max() <= bound * (1 + 1e-6)


def test_fragments_are_due_in_turns():
    due = {step: due_after(step, 30, 3) for step in range(1, 61) if due_after(step, 30, 3)}
    assert due == {10: [1], 20: [2], 30: [0], 40: [1], 50: [2], 60: [0]}
    names = ["tok_embeddings.weight", *(f"layers.{i}.w.weight" for i in range(6)), "norm.weight"]
    assert list(fragments_of(names, 6, 3).values()) == [0, 0, 0, 1, 1, 2, 2, 2]
    own = {"layers.0.w.weight": torch.nn.Parameter(torch.ones(4))}  # a pipeline rank's
    outer = OuterSteps(own, 6, Outer(every=3, bits=4, fragments=3))
    assert all(outer.after(step) for step in (1, 2, 3))


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
            assert outer.after(step, last=step == 13, rejected=step == 7)
        assert step not in (7, 13) or torch.equal(weight, outer.common["w"])
        common = (7, 13) if overlap else (3, 6, 7, 9, 12, 13)  # also what step 7 has left of it
        assert outer.together is (step in common)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-8)


def test_an_interval_of_rejected_steps_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    outer = OuterSteps({"w": weight}, 1, Outer(every=1))
    weight.data += 1
    assert outer.after(1)
    kept = weight.detach().clone()
    assert outer.after(2, rejected=True) and weight.equal(kept) and outer.common["w"].equal(kept)


@pytest.mark.parametrize("together", [True, False])
def test_states_are_those_of_the_whole_model(together, monkeypatch):
    """Buffers and what does not train too; another number of replicas says what it drops."""
    lines = []
    monkeypatch.setattr(console, "info", lines.append)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    parameters = trained_parameters(model)
    outer = OuterSteps(parameters, 1, Outer(every=3, bits=4, overlap=True))
    states = {MODEL: ModelWrapper(model)}
    OuterStates(outer, None).replace_in(states)
    assert states[MODEL].state_dict().keys() == model.state_dict().keys() > parameters.keys()
    saved = copy.deepcopy(states[MODEL].state_dict())
    own = {} if together else {"outer.replica_1.weights.0.weight": 0}
    states["outer"].expect(["outer.replica_1.residual.0.weight", *own], whole=True)
    assert "what rounding has left of their messages" in lines[0]
    for value in model.state_dict().values():  # drawn again, or what a replica has trained
        value += 1
    trained = copy.deepcopy(model.state_dict())
    states[MODEL].load_state_dict(saved)
    for name, value in model.state_dict().items():
        expected = trained if name in parameters and not together else saved
        assert value.equal(expected[name])
    outer.resume(0)  # a new run, which sends nothing before its first step
    assert outer.after(1) and all(value.equal(saved[n]) for n, value in outer.common.items())
