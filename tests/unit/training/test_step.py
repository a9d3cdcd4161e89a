# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A step of an optimizer that communicates, whatever the verdict is."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.unit.tiny_trainer import microbatches, parameters, tiny_trainer


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
