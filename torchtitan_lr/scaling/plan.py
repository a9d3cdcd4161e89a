# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runs of a scaling experiment: their models, lengths and learning rates, as points of a sweep.

Learning rates are searched at the first budget and seed of the searched sizes. What a finished
search determines can be planned then, so the points follow from the losses that are known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan_lr.config.shipped import find_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiment import Experiment
from torchtitan_lr.scaling.experiments import place_run
from torchtitan_lr.scaling.sweep import Point, refuse_keys

OWN_KEYS = {
    "job.dump_folder": "each run has a folder of its own",
    "job.config_file": "the key config names it",
    "model.name": "the key model of a family names it",
    "model.flavor": "the key flavor of a size names it",
    "training.steps": "they follow from tokens_per_parameter",
    "lr_scheduler.warmup_steps": "a tenth of the steps",
    "optimizer.lr": "it follows from [learning_rate]",
    "debug.seed": "the key seeds has them",
    "metrics.wandb_group": "it is the experiment's name",
    "metrics.wandb_run_name": "it is the run's name",
    "metrics.wandb_tags": "they are family, size, budget and seed",
    "validation.freq": "the last step of a run is validated",
}
"""Keys that the experiment sets for each run, and why they cannot be overridden."""

WARMUP = 0.1
"""Share of the steps in which the learning rate grows."""


@dataclass(frozen=True)
class Cost:
    """The model of a family at a size.

    Args:
        counted: N, the parameters without embedding and head.
        flops_per_token: Forward and backward, without recomputation.
        tokens_per_step: Tokens of all ranks per optimizer step.
    """

    counted: int
    flops_per_token: int
    tokens_per_step: int


@dataclass(frozen=True)
class Choice:
    """The learning rate of a family at a size.

    Args:
        rate: The value; None while it is unknown, or if no value inside the grid is best.
        grid: The values that are searched at this size; empty without a search.
        edge: The value of least loss, if it is an edge of the grid.
    """

    rate: float | None
    grid: tuple[float, ...] = ()
    edge: float | None = None


def search(grid: Sequence[float], losses: Mapping[float, float]) -> Choice:
    """Return the state of a search of the learning rate.

    Args:
        grid: The values in ascending order; one value needs no search.
        losses: Validation loss by value; infinite for a run that diverged.
    """
    values = tuple(grid)
    if len(values) == 1:
        return Choice(values[0])
    if not all(rate in losses for rate in values):
        return Choice(None, values)
    best = min(values, key=lambda rate: losses[rate])
    if values[0] < best < values[-1]:
        return Choice(best, values)
    return Choice(None, values, best)


def _name(family: str, size: str, budget: float, seed: int, rate: float | None) -> str:
    """Return the name of a run's folder and of its wandb run."""
    return f"{family}_{size}_{budget:g}_seed{seed}_lr{rate or 0:g}"


class Plan:
    """An experiment with the cost of every family at every size.

    Args:
        experiment: The experiment.
        work: Folder of all runs; the models of the sizes are written to ``models`` in it.

    Raises:
        ConfigError: A configuration is not valid, or an override sets a key of the experiment.
    """

    def __init__(self, experiment: Experiment, work: Path) -> None:
        self.experiment, self.work = experiment, work
        self._config = find_config(experiment.config)
        refuse_keys(experiment.overrides, OWN_KEYS, "overrides: ")
        for name, family in experiment.families.items():
            refuse_keys(family.overrides, OWN_KEYS, f"families.{name}.overrides: ")
        pairs = [(family, size) for family in experiment.families for size in experiment.sizes]
        self._overrides = {pair: self._model(*pair) for pair in pairs}
        self.costs = {pair: self._cost(*pair) for pair in pairs}

    def _model(self, family: str, size: str) -> list[str]:
        """Return the overrides of a family at a size; write the file of a flavor that is new."""
        from torchtitan_lr.models.args import LlamaArgs
        from torchtitan_lr.models.families.registry import FAMILIES, find_family
        from torchtitan_lr.models.stored_args import write_model_args

        arm, shape = self.experiment.families[family], self.experiment.sizes[size]
        flavor = shape.flavor
        if not flavor:
            found = find_family(arm.model)
            if found is None:
                choices = ", ".join(known.model_name for known in FAMILIES.values())
                raise ConfigError(f"families.{family}.model", arm.model, f"one of {choices}")
            rank = max(1, shape.dim // 4) if found.low_rank else 0
            # Where the nonlinearities are is the family's; the ranks are the size's.
            settings = found.defaults("debug") | {"rank_attention": rank, "rank_ffn": rank}
            args = LlamaArgs(
                family=found.name,
                dim=shape.dim,
                ffn_dim=shape.ffn_dim,
                n_layers=shape.n_layers,
                n_heads=shape.n_heads,
                vocab_size=shape.vocab_size,
                **settings,
            )
            path = self.work / "models" / f"{args.family}_{size}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_model_args(args, path)
            flavor = str(path)
        overrides = [*self.experiment.overrides, *arm.overrides]
        names = [f"--model.name={arm.model}", f"--model.flavor={flavor}"]
        return [*(f"--{item}" for item in overrides), *names]

    def _cost(self, family: str, size: str) -> Cost:
        from torchtitan_lr.estimate.run import read_run
        from torchtitan_lr.formulas.flops import flops_per_token
        from torchtitan_lr.formulas.parameters import count_parameters

        own = [f"--job.config_file={self._config}", f"--job.dump_folder={self.work / 'none'}"]
        ranks = self.experiment.families[family].ranks
        placed = place_run([*own, *self._overrides[family, size]], ranks)
        if not placed.config.validation.enable:
            raise ConfigError("validation.enable", False, "true: the fit reads the validation loss")
        run = read_run(placed.config, ranks)
        parts = count_parameters(run.args)
        return Cost(
            counted=parts.total - parts.embedding - parts.head,
            flops_per_token=flops_per_token(run.args, run.seq_len),
            tokens_per_step=run.tokens
            * (run.microbatches * run.accumulation * run.shard * run.replicas),
        )

    def steps(self, family: str, size: str, budget: float) -> int:
        """Return the optimizer steps of a run, at least one."""
        own, reference = self.costs[family, size], self.costs[self.experiment.reference, size]
        equal = self.experiment.equal
        tokens = budget * (own if equal == "tokens_per_parameter" else reference).counted
        if equal == "flops":
            tokens *= reference.flops_per_token / own.flops_per_token
        return max(1, round(tokens / own.tokens_per_step))

    def point(self, family: str, size: str, budget: float, seed: int, rate: float | None) -> Point:
        """Return a run as a point of a sweep.

        Args:
            family: Its family.
            size: Its size.
            budget: Tokens per parameter.
            seed: ``debug.seed``.
            rate: Learning rate; None where a search is still to choose it.

        Returns:
            The point; its settings have these, N, the tokens D, and the FLOPs of all ranks.
        """
        experiment, cost = self.experiment, self.costs[family, size]
        steps, name = self.steps(family, size, budget), _name(family, size, budget, seed, rate)
        saving = ["--checkpoint.no_enable"]
        if experiment.checkpoints:
            interval = max(1, math.ceil(steps / experiment.checkpoints))
            saving = ["--checkpoint.enable", f"--checkpoint.interval={interval}"]
            saving.append("--checkpoint.keep_latest_k=2")
        arguments = [
            *saving,
            *self._overrides[family, size],
            f"--training.steps={steps}",
            f"--lr_scheduler.warmup_steps={round(WARMUP * steps)}",
            f"--validation.freq={steps}",
            f"--optimizer.lr={rate}",
            f"--debug.seed={seed}",
            f"--metrics.wandb_group={experiment.name}",
            f"--metrics.wandb_run_name={name}",
            f"--metrics.wandb_tags={family},{size},tokens_per_parameter_{budget:g},seed_{seed}",
        ]
        tokens = steps * cost.tokens_per_step
        settings = {"family": family, "size": size, "tokens_per_parameter": budget, "seed": seed}
        settings |= {"learning_rate": rate, "N": cost.counted, "D": tokens}
        settings["FLOPs"] = float(tokens) * cost.flops_per_token
        return Point(name, self._config, arguments, settings, experiment.families[family].ranks)

    def rates(self, losses: Mapping[str, float]) -> dict[tuple[str, str], Choice]:
        """Choose every learning rate that finished runs determine.

        Args:
            losses: Validation loss by run; infinite for a run that diverged.
        """
        experiment, found = self.experiment, dict[tuple[str, str], Choice]()
        for family, arm in experiment.families.items():
            if arm.rate_of:
                continue
            for size in experiment.learning_rate.search:
                first = experiment.sizes[size].budgets[0], experiment.sizes[size].seeds[0]
                names = {rate: _name(family, size, *first, rate) for rate in arm.learning_rates}
                known = {rate: losses[name] for rate, name in names.items() if name in losses}
                found[family, size] = search(arm.learning_rates, known)
            for size in experiment.sizes:
                if (family, size) not in found:
                    found[family, size] = Choice(self._beyond(found, family, size))
        for family, arm in experiment.families.items():
            for size in experiment.sizes if arm.rate_of else ():
                found[family, size] = Choice(found[arm.rate_of, size].rate)
        return found

    def _beyond(
        self, found: Mapping[tuple[str, str], Choice], family: str, size: str
    ) -> float | None:
        """Return the rate at a size without a search, from those of all searched sizes."""
        rates = {s: found[family, s].rate for s in self.experiment.learning_rate.search}
        known = [math.log(rate) for rate in rates.values() if rate is not None]
        if len(known) < len(rates):
            return None
        if len(known) == 1:
            return next(iter(rates.values()))
        slope, offset = np.polyfit(
            [math.log(self.costs[family, s].counted) for s in rates], known, 1
        )
        value = math.exp(offset + slope * math.log(self.costs[family, size].counted))
        return float(f"{value:.3g}")

    def main_points(self, rates: Mapping[tuple[str, str], Choice]) -> list[Point]:
        """Return the points that a fit uses: all budgets and seeds, at the chosen rates or None."""
        return [
            self.point(family, size, budget, seed, rates[family, size].rate)
            for family, size in self.costs
            for budget in self.experiment.sizes[size].budgets
            for seed in self.experiment.sizes[size].seeds
        ]

    def points(self, rates: Mapping[tuple[str, str], Choice]) -> list[Point]:
        """Return the points that can start: of searches, and of known rates; cheapest first."""
        sizes = self.experiment.sizes
        found = [
            self.point(family, size, sizes[size].budgets[0], sizes[size].seeds[0], rate)
            for (family, size), choice in rates.items()
            for rate in choice.grid
        ]
        main = self.main_points(rates)
        found += [point for point in main if point.settings["learning_rate"] is not None]
        different = {point.name: point for point in found}
        return sorted(different.values(), key=lambda point: float(point.settings["FLOPs"]))

    def edges(self, rates: Mapping[tuple[str, str], Choice]) -> list[str]:
        """Return one line for each search without a best value inside its grid."""
        return [
            f"{family} {size}: learning rate {choice.edge:g} is an edge of its grid "
            f"({choice.grid[0]:g} to {choice.grid[-1]:g}), or no run converged: widen the grid"
            for (family, size), choice in rates.items()
            if choice.edge is not None
        ]
