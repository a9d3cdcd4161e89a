# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam's work during backward: order of the sums, freed gradients, the same numbers."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn

from tests.unit.tiny import tiny_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.optim.tsr.sums import DENSE, EarlySums
from torchtitan_lr.optim.tsr.container import TSROptimizers

SETTINGS = TSRSettings(rank=3, embedding_rank=2, refresh_interval=3, embedding_refresh_interval=3)
DEFAULTS = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1}
ORDER = [(0, 1), (DENSE, 0), (0, 0), (1, 0)]
BUCKETS = [[(0, 1), (0, 0)], [(1, 0)], [(DENSE, 0)]]
IN_TURN = [[(DENSE, 0)], [(0, 1), (0, 0)], [(1, 0)]]
"""By the place in `ORDER` of their last gradient."""


@pytest.mark.parametrize("arrival", permutations(ORDER), ids=str)
def test_sums_start_in_one_order_whatever_arrives_first(arrival):
    started = []
    sums = EarlySums(
        BUCKETS, ORDER, lambda bucket: started.append(bucket) or (lambda: None), early=True
    )
    for number, place in enumerate(arrival, 1):
        sums.ready(place)
        here = set(arrival[:number])
        count = next((i for i, bucket in enumerate(IN_TURN) if not here.issuperset(bucket)), 3)
        assert started == IN_TURN[:count]
    assert sums.started == set(ORDER)


def test_nothing_starts_early_where_backward_runs_more_than_once():
    started = []
    sums = EarlySums(
        BUCKETS, ORDER, lambda bucket: started.append(bucket) or (lambda: None), early=False
    )
    for place in ORDER:
        sums.ready(place)
    assert not started
    sums.ready(None)
    assert started == IN_TURN


def build(settings=SETTINGS):
    torch.manual_seed(0)
    model = LlamaModel(tiny_args("full")).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model, TSROptimizers([model], settings, dict(DEFAULTS))


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.model_args.vocab_size, (2, 8), generator=generator)
    model(tokens).double().square().mean().backward()


def step(model, optimizer, seeds, hooks):
    optimizer.zero_grad()
    for seed in seeds:
        if hooks:
            optimizer.prepare(last=seed == seeds[-1])
        backward(model, seed)
        optimizer.accumulate(last=seed == seeds[-1])
    norm = optimizer.synchronize()
    optimizer.clip(0.1, norm)
    optimizer.step()
    return norm


@pytest.mark.parametrize("stagger", [False, True])
def test_hooks_change_no_bit(stagger):
    (one, first), (two, second) = (build(replace(SETTINGS, stagger=stagger)) for _ in range(2))
    for round_ in range(4):
        seeds = [2 * round_, 2 * round_ + 1]
        assert torch.equal(step(one, first, seeds, True), step(two, second, seeds, False))
        for found, expected in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(found, expected)


def live_bytes(model):
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_gradients_of_compressed_matrices_are_gone_when_backward_ends():
    model, optimizer = build()
    step(model, optimizer, [0], True)  # refreshes
    dense = sum(p.nbytes for part in optimizer.optimizers for p in part.dense)
    most = 0

    def watch(_):
        nonlocal most
        most = max(most, live_bytes(model))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(watch)
    optimizer.zero_grad()
    optimizer.prepare(last=True)
    backward(model, 1)
    assert live_bytes(model) == most == dense
    # The control: without `prepare` all of them are there at the end.
    optimizer.zero_grad()
    backward(model, 1)
    whole = sum(p.nbytes for p in model.parameters())
    assert live_bytes(model) == whole > 2 * dense


def test_a_small_gradient_does_not_keep_a_units_buffer_alive():
    """FSDP2's gradients of one unit are views of one buffer."""
    model, optimizer = build()
    step(model, optimizer, [0], True)
    optimizer.zero_grad()
    names = ("attention.wq.weight", "attention_norm.weight")
    wq, norm = (model.get_parameter(f"layers.0.{name}") for name in names)
    buffer = torch.randn(wq.numel() + norm.numel(), dtype=torch.float64)
    expected = buffer[wq.numel() :].clone()
    optimizer.prepare(last=True)
    wq.grad, norm.grad = (part.view(p.shape) for part, p in zip(
        buffer.split([wq.numel(), norm.numel()]), (wq, norm), strict=True
    ))  # fmt: skip
    for parameter in (wq, norm):
        for hook in parameter._post_accumulate_grad_hooks.values():  # as FSDP2 calls them
            hook(parameter)
    assert live_bytes(model) == norm.nbytes
    assert torch.equal(norm.grad, expected)


def test_a_gradient_that_comes_too_late_is_refused():
    model, optimizer = build()
    step(model, optimizer, [0], True)
    optimizer.zero_grad()
    optimizer.prepare(last=True)
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"second gradient .*tsr_overlap_buckets = 1"):
        backward(model, 1)
    # The control: with one bucket no sum starts before the end of backward.
    model, optimizer = build(replace(SETTINGS, overlap_buckets=1))
    optimizer.prepare(last=True)
    backward(model, 1)
    backward(model, 1)
    optimizer.accumulate(last=True)
