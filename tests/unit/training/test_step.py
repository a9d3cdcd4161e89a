# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step whose parts are left out or called in another order raises, and changes nothing."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.unit.tiny_trainer import microbatches, parameters, tiny_trainer
from torchtitan_lr.training.step import PARTS

TSR = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=2", "--optimizer.tsr_embedding_rank=2"]


@pytest.fixture(params=[[], TSR], ids=["stored", "TSR-Adam"])
def trainer(request, tmp_path):
    with tiny_trainer(tmp_path, "--training.global_batch_size=6", *request.param) as trainer:
        yield trainer


def calls_of(trainer, batches):
    """The parts of a step, by name, as the trainer calls them."""
    step = trainer.running_step
    arguments = {"take": [batches], "backward": [trainer.forward_backward_step]}
    arguments |= {"read_ahead": [None], "decide": [False]}
    return {part: partial(getattr(step, part), *arguments.get(part, ())) for part in PARTS}


def test_only_the_next_part_can_be_called(trainer):
    """So that a part that is left out, called twice or too early raises, and does nothing."""
    (model,) = trainer.model_parts
    for seed in range(2):
        calls = calls_of(trainer, iter(microbatches(seed)))
        start = parameters(model)
        for part in PARTS:
            before = parameters(model)
            for other in PARTS:
                if other != part:
                    with pytest.raises(RuntimeError, match=rf"Step.{other}\(\) was called after"):
                        calls[other]()
            after = parameters(model)
            assert all(torch.equal(after[name], weight) for name, weight in before.items())
            calls[part]()
        assert not torch.equal(parameters(model)["output.weight"], start["output.weight"])


def test_a_part_that_fails_ends_the_steps(trainer):
    calls = calls_of(trainer, iter(microbatches()))
    calls["take"]()
    with pytest.raises(TypeError):
        trainer.running_step.backward(None)
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"Step.{name}\(\) was called after a failed back"):
            call()


class Spectral(torch.optim.SGD):
    """Sums the small Gram matrix of each gradient over the ranks before it changes a weight."""

    takes_verdict = True

    @torch.no_grad()
    def step(self, closure=None):
        self.sums = 0
        for parameter in self.param_groups[0]["params"]:
            flat = parameter.grad.view(-1, parameter.shape[-1])
            gram = flat.mT @ flat
            dist.all_reduce(gram)
            self.sums += 1
            update = parameter.grad / gram.norm().sqrt()
            parameter.sub_(update.masked_fill(self.found_inf > 0, 0.0), alpha=0.1)


@pytest.mark.parametrize("rejected", [False, True])
def test_an_optimizer_may_communicate_whatever_the_verdict_is(rejected, tmp_path):
    options = ["--training.global_batch_size=6", "--training.max_skipped_steps=1"]
    with tiny_trainer(tmp_path, *options) as trainer:
        (model,) = trainer.model_parts
        optimizer = trainer.optimizers.optimizers[0] = Spectral(model.parameters())
        before = parameters(model)
        factor = math.nan if rejected else 1.0
        model.register_forward_hook(lambda *call: call[-1] * factor)
        trainer.step = 1
        trainer.train_step(iter(microbatches()))
        assert optimizer.sums == len(before) > 5
        same = {torch.equal(weight, before[name]) for name, weight in parameters(model).items()}
        assert same == {rejected}
        assert trainer.skipped_steps == int(rejected)
