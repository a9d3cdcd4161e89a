# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""FSDP, DTensor and collectives."""

import torch
from torch import nn

from torchtitan_lr.compat import fsdp


def test_fsdp_the_layout_of_a_unit(unit):
    found = list(fsdp.unit_parameters(unit))
    assert [size for _, size in found] == [9, 3]  # 5 rows over 2 ranks, padded
    assert all(a is b for (a, _), b in zip(found, unit.parameters(), strict=True))
    assert fsdp.param_groups(nn.Linear(1, 1)) == []


def test_fsdp_the_calls_of_a_unit(unit):
    called = []

    def wrap(original):
        def noted(*args, **kwargs):
            called.append(original.__name__)
            return original(*args, **kwargs)

        return noted

    undo = fsdp.wrap_unit_calls(unit, wrap)
    unit(torch.ones(2, 3)).sum().backward()
    assert set(called) == {"unshard", "post_backward"}
    inner = fsdp.wrap_unit_calls(unit, wrap)
    inner()
    called.clear()
    unit(torch.ones(2, 3)).sum().backward()
    assert set(called) == {"unshard", "post_backward"}  # a ledger's, after another's within it
    undo()
    called.clear()
    unit(torch.ones(2, 3)).sum().backward()
    assert not called


def test_fsdp_the_gradients_that_a_unit_sums(unit):
    """This rank's own, of two passes of which the first one sums nothing."""
    norms = []
    fsdp.watch_gradients(unit, norms)
    unit.set_requires_gradient_sync(False)
    unit(torch.ones(2, 3)).sum().backward()
    assert norms == []
    unit.set_requires_gradient_sync(True)
    unit(torch.ones(4, 3)).sum().backward()
    assert len(norms) == 1
    ((parameters, found),) = norms
    assert all(a is b for a, b in zip(parameters, unit.parameters(), strict=True))
    # 15 and 5 entries, of 2 + 4.
    torch.testing.assert_close(found, torch.tensor([540.0, 180.0]).sqrt())


def test_fsdp_sends_in_another_dtype_than_it_adds_in(unit):
    """bf16 has no 257, and its sum of 256 and 1 is 256."""
    fsdp.send_in(unit, torch.bfloat16)
    unit.set_requires_gradient_sync(False)
    unit(torch.ones(256, 3)).sum().backward()
    for _ in range(2):
        unit(torch.ones(1, 3)).sum().backward()
    unit.set_requires_gradient_sync(True)
    unit(torch.ones(3, 3)).sum().backward()  # 261
    for parameter in unit.parameters():
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad.full_tensor() == 260).all()


def test_sums_that_fsdp_reads_at_once(unit):
    """It casts them, adds them to gradients, or calls hooks; otherwise it only makes views."""
    unit(torch.ones(2, 3)).sum().backward()
    sums = torch.ones(12)
    assert fsdp.reads_sums_at_once(unit, sums)  # gradients are there
    unit.zero_grad()
    assert not fsdp.reads_sums_at_once(unit, sums)
    assert fsdp.reads_sums_at_once(unit, sums.bfloat16())
    handle = next(unit.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    assert fsdp.reads_sums_at_once(unit, sums)
    handle.remove()
    assert not fsdp.reads_sums_at_once(unit, sums)
