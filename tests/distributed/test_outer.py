# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas that train apart between outer steps, in layouts of their own.

What an outer step does to a parameter, and how messages are coded, is in `tests/unit/optim`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.training import small_trainer, train
from tests.support.parity_runs import EXACT, degrees, largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.containers import NamedOptimizers, trained_parameters
from torchtitan_lr.optim.entries import ENTRIES, OptimizerEntry, register_optimizer

COLA = ["--model.name=llama_cola", "--training.steps=4", "--lr_scheduler.warmup_steps=0"]
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
PLAIN = ["--outer.lr=1", "--outer.momentum=0", "--outer.no_nesterov"]  # the mean of the weights
APART = [*COLA, REPLICAS, "--outer.every=3", "--outer.momentum=0.6"]


def test_one_replica_is_the_inner_optimizer_bit_for_bit(one_rank: RankPool) -> None:
    common = [*COLA, *degrees()]
    expected = one_rank.run(train, common)[0]
    run = one_rank.run(train, [*common, *PLAIN, "--outer.every=1"])[0]
    assert largest_difference(run, expected) == 0.0
    moved = one_rank.run(train, [*common, "--outer.every=2"])[0]
    assert run["losses"][:2] == moved["losses"][:2] and run["losses"][2] != moved["losses"][2]


def build_sgd(parts: Any, config: Any, dims: Any) -> NamedOptimizers:
    names = list(trained_parameters(*parts))
    parameters = list(trained_parameters(*parts).values())
    sgd = torch.optim.SGD([{"params": parameters, "param_names": names}], lr=0.1)
    return NamedOptimizers(parts, [sgd])


def with_sgd(arguments: list[str]) -> dict[str, Any]:
    register_optimizer(OptimizerEntry("PlainSGD", build_sgd))
    try:
        return train([*arguments, "--optimizer.name=PlainSGD", "--optimizer.lr=0.5"])
    finally:
        del ENTRIES["PlainSGD"]


def test_sgd_apart_for_a_step_is_sgd_on_the_mean_gradient(two_ranks: RankPool) -> None:
    # Pairs: the ranks have different numbers of labels.
    options = [*COLA, *degrees(local_batch=4), REPLICAS, "--training.max_norm=inf"]
    options += ["--training.dataset=python_stdlib_docs", "--training.seq_len=64"]
    expected = two_ranks.run(with_sgd, options)[0]
    run = two_ranks.run(with_sgd, [*options, *PLAIN, "--outer.every=1"])[0]
    run["grad_norms"] = expected["grad_norms"]  # those of a replica's own gradients
    assert largest_difference(run, expected) < EXACT


def clipped_apart(max_norm: float) -> tuple[float, float]:
    """Train by the trainer, and by torch's classes on its gradients; return the difference."""
    options = [*APART, *degrees(local_batch=4), f"--training.max_norm={max_norm}"]
    with small_trainer([*options, "--training.steps=7"]) as trainer:
        own = trained_parameters(*trainer.model_parts)
        twins = {n: torch.nn.Parameter(local_part(p).detach().double()) for n, p in own.items()}
        common = {name: torch.nn.Parameter(twin.detach().clone()) for name, twin in twins.items()}
        adamw = torch.optim.AdamW(twins.values(), betas=(0.9, 0.999), eps=1e-5, weight_decay=0.01)
        sgd = torch.optim.SGD(common.values(), lr=0.7, momentum=0.6, nesterov=True)
        clip, norms = trainer.gradients.clip, []

        def noted(largest: float, norm: Any) -> None:
            for name, twin in twins.items():
                gradient = own[name].grad
                assert gradient is not None
                twin.grad = local_part(gradient).double().clone()
            norms.append(float(torch.nn.utils.clip_grad_norm_(twins.values(), largest)))
            adamw.param_groups[0]["lr"] = trainer.optimizers.optimizers[0].param_groups[0]["lr"]
            adamw.step()
            clip(largest, norm)

        trainer.gradients.clip = noted
        batches = iter(trainer.dataloader)
        for step in range(1, 8):
            trainer.step = step
            trainer.train_step(batches)
            if step in (3, 6, 7):
                for name, weight in common.items():
                    weight.grad = weight.detach() - twins[name].detach()
                    dist.all_reduce(weight.grad)
                    weight.grad /= 2
                sgd.step()
                for name, weight in common.items():
                    twins[name].data.copy_(weight.data)
        gaps = [(local_part(own[n]) - twin).abs().max() for n, twin in twins.items()]
    return float(max(gaps)), max(norms)


def test_replicas_are_plain_models_with_norms_of_their_own(two_ranks: RankPool) -> None:
    for gap, norm in two_ranks.run(clipped_apart, 0.5):
        assert gap < 2e-6 and norm > 0.5


LAYOUTS = [[], ["--outer.bits=4"], ["--outer.fragments=2"]]


@pytest.mark.parametrize("more", LAYOUTS, ids=["plain", "4bits", "fragments"])
def test_layouts_inside_a_replica_change_nothing(
    more: list[str], two_ranks: RankPool, four_ranks: RankPool
) -> None:
    options = [*APART, *more]
    expected = two_ranks.run(train, [*options, *degrees(local_batch=4)])[0]
    layouts = [degrees(local_batch=2), degrees(tensor=2, local_batch=4)]
    if more:  # blocks of common scales are cut otherwise by other layouts
        layouts = [degrees(pipeline=2, local_batch=4)]
    for layout in layouts:
        run = four_ranks.run(train, [*options, *layout])[0]
        if "--outer.bits=4" in more:
            assert run["losses"][:3] == pytest.approx(expected["losses"][:3], rel=EXACT)
        else:
            assert largest_difference(run, expected) < EXACT
