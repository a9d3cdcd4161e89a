# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Each key of ``[grad_compression]`` that a resumed run changes is applied, or refused."""

import warnings
from typing import Any

import pytest
import torch

from tests.distributed.training import small_trainer
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compression.units import compressors_of
from torchtitan_lr.errors import ConfigError

BASE = [
    *("--model.name=llama_full", "--training.local_batch_size=4", "--training.steps=4"),
    *("--checkpoint.enable", "--grad_compression.codec=sketch", "--grad_compression.min_size=1000"),
    *("--grad_compression.level=custom", "--grad_compression.c=4", "--grad_compression.theta=0.92"),
]
APPLIED = {
    "codec": ["codec=sparse"],
    "without a codec": ["codec=none"],
    "level": ["level=10x"],
    "c": ["c=2"],
    "theta": ["theta=0.95"],
    "auto": ["theta=0.5", "auto"],
}
REFUSED = {
    "auto": (["theta=0.5"], "grad_compression.theta: got 0.5, expected a theta of at least "),
    "layers": (["layers=non_attention"], "grad_compression.layers: got 'non_att"),
    "min_size": (["min_size=5000"], "grad_compression.min_size: got 5000, expected 1000"),
}


def arguments(folder: str, changes: list[str]) -> list[str]:
    more = [f"--grad_compression.{change}" for change in changes]
    return [*BASE, f"--job.dump_folder={folder}", *more]


def step(trainer: Any, batches: Any) -> list[torch.Tensor]:
    """Train a step; return this rank's part of every weight."""
    trainer.step += 1
    trainer.train_step(batches)
    return [local_part(p).detach().clone() for p in trainer.model_parts[0].parameters()]


def resumed(folder: str, changes: list[str]) -> list[torch.Tensor]:
    with small_trainer(arguments(folder, changes)) as trainer:
        assert trainer.checkpointer.load(2)
        return step(trainer, iter(trainer.dataloader))


def own_training(folder: str, changes: list[str], learned: Any) -> list[torch.Tensor]:
    """The same of a run that has the values from its start, and is given what the other learned."""
    weights, states, residuals = learned
    with small_trainer(arguments(f"{folder}-own", changes)) as trainer:
        (optimizer,) = trainer.optimizers
        parameters = optimizer.param_groups[0]["params"]
        for parameter, weight, state in zip(parameters, weights, states, strict=True):
            local_part(parameter.detach()).copy_(weight)
            optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}
        for compressor, (residual, exchanges) in zip(
            compressors_of(trainer.model_parts), residuals, strict="codec=none" not in changes
        ):
            compressor.residual.copy_(residual)
            compressor.exchanges = exchanges
        batches = iter(trainer.dataloader)
        with warnings.catch_warnings():  # the schedule moves before the optimizer
            warnings.simplefilter("ignore")
            for _ in range(2):
                next(batches)
                trainer.lr_schedulers.step()
        trainer.step = 2
        return step(trainer, batches)


def every_change(folder: str) -> dict[str, tuple[bool, bool]]:
    """Stop a run after two steps, and go on with each change, on this rank."""
    with small_trainer(arguments(folder, [])) as trainer:
        batches = iter(trainer.dataloader)
        weights = [step(trainer, batches) for _ in range(2)][-1]
        (optimizer,) = trainer.optimizers
        states = [
            {name: value.clone() for name, value in optimizer.state[p].items()}
            for p in optimizer.param_groups[0]["params"]
        ]
        residuals = [(c.residual.clone(), c.exchanges) for c in compressors_of(trainer.model_parts)]
        trainer.checkpointer.save(2, last_step=True)
    learned = (weights, states, residuals)
    unchanged = resumed(folder, [])
    found = {"": (same(unchanged, own_training(folder, [], learned)), True)}
    for name, changes in APPLIED.items():
        run = resumed(folder, changes)
        found[name] = (same(run, own_training(folder, changes, learned)), same(run, unchanged))
    return found


def same(run: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, run, other))


def refusals(folder: str) -> dict[str, str]:
    found = {}
    for name, (changes, _) in REFUSED.items():
        with pytest.raises(ConfigError) as error, small_trainer(arguments(folder, changes)):
            pass
        found[name] = str(error.value)
    return found


def test_a_changed_key_is_applied_or_refused(two_ranks: RankPool, tmp_path: Any) -> None:
    folder = str(tmp_path / "run")
    for rank in two_ranks.run(every_change, folder):
        assert rank.pop("") == (True, True)
        assert rank == dict.fromkeys(APPLIED, (True, False))
    for rank in two_ranks.run(refusals, folder):
        for name, (_, line) in REFUSED.items():
            assert rank[name].startswith(line) and "\n" not in rank[name], name
