# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam's work during backward: order of the sums, freed gradients."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import nn

from tests.unit.tiny import tiny_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.optim.tsr.sums import EarlySums, Sum

SETTINGS = TSRSettings(rank=3, embedding_rank=2, refresh_interval=3, embedding_refresh_interval=3)
DEFAULTS = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1}
ORDER = ["wq", "norm", "wk", "embedding"]
BUCKETS = [["wq", "wk"], ["embedding"], ["norm"]]
IN_TURN = [["norm"], ["wq", "wk"], ["embedding"]]
"""By the place in `ORDER` of their last gradient."""


@pytest.mark.parametrize("arrival", permutations(ORDER), ids=str)
def test_sums_start_in_one_order_whatever_arrives_first(arrival):
    started = []
    sums = EarlySums([Sum(names, partial(started.append, names)) for names in BUCKETS], ORDER)
    for number, place in enumerate(arrival, 1):
        sums.ready(place)
        here = set(arrival[:number])
        count = next((i for i, bucket in enumerate(IN_TURN) if not here.issuperset(bucket)), 3)
        assert started == IN_TURN[:count]
    assert sums.started == set(ORDER)


def build(settings=SETTINGS):
    torch.manual_seed(0)
    model = LlamaModel(tiny_args("full")).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model, TSRAdam(model.named_parameters(), settings, **DEFAULTS)


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.model_args.vocab_size, (2, 8), generator=generator)
    model(tokens).double().square().mean().backward()


def live_bytes(model):
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_gradients_of_compressed_matrices_are_gone_when_backward_ends():
    model, optimizer = build()
    backward(model, 0)
    optimizer.step()  # refreshes
    dense = sum(p.nbytes for p in model.parameters() if "left" not in optimizer.state[p])
    most = 0

    def watch(_):
        nonlocal most
        most = max(most, live_bytes(model))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(watch)
    optimizer.zero_grad()
    # The control: outside of a step all of them are there at the end.
    backward(model, 1)
    whole = sum(p.nbytes for p in model.parameters())
    assert live_bytes(model) == whole > 2 * dense
    optimizer.zero_grad()
    most = 0
    optimizer.begin()
    with optimizer.micro_batch(last=True):
        backward(model, 1)
        assert live_bytes(model) == most == dense


def test_a_gradient_that_comes_too_late_is_refused():
    refused = pytest.raises(RuntimeError, match=r"second gradient .*tsr_overlap_buckets = 1")
    # With one bucket no sum starts before the end of backward.
    for buckets, outcome in ((4, refused), (1, nullcontext())):
        model, optimizer = build(replace(SETTINGS, overlap_buckets=buckets))
        optimizer.begin()
        with outcome, optimizer.micro_batch(last=True):
            backward(model, 1)
            backward(model, 1)
