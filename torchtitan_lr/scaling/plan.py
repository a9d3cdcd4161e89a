# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runs of a scaling experiment: their models, lengths and learning rates, as points of a sweep.

Learning rates are searched at the first budget and seed of the searched sizes. What a finished
search determines can be planned then, so the points follow from the losses that are known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    "lr_scheduler.warmup_steps": "they follow from warmup",
    "optimizer.lr": "it follows from [learning_rate]",
    "debug.seed": "the key seeds has them",
    "metrics.wandb_group": "it is the experiment's name",
    "metrics.wandb_run_name": "it is the run's name",
    "metrics.wandb_tags": "they are family, size, budget and seed",
    "validation.freq": "the last step of a run is validated",
}
"""Keys that the experiment sets for each run, and why they cannot be overridden."""


@dataclass(frozen=True)
class Cost:
    """The model of a family at a size.

    Args:
        counted: N, the parameters of ``count``.
        width: Width d of the residual stream.
        flops_per_token: Forward and backward, without recomputation.
        tokens_per_step: Tokens of all ranks per optimizer step.
    """

    counted: int
    width: int
    flops_per_token: int
    tokens_per_step: int


@dataclass(frozen=True)
class Choice:
    """The learning rate of a family at a size.

    Args:
        rate: The value; None while it is unknown, or if no value inside the grid is best.
        grid: The values that are searched, those added beyond an edge included; empty without a
            search at this size.
        edge: The value of least loss, if it is an edge of the grid and the grid may not grow.
    """

    rate: float | None
    grid: tuple[float, ...] = ()
    edge: float | None = None


def search(values: list[float], losses: Mapping[float, float], extend: int) -> Choice:
    """Return the state of a search of the learning rate.

    Args:
        values: The grid in ascending order; one value needs no search.
        losses: Validation loss by value; infinite for a run that diverged.
        extend: How often the grid may grow by one value.
    """
    grid = tuple(values)
    if len(grid) == 1:
        return Choice(grid[0])
    while all(rate in losses for rate in grid):
        best = min(grid, key=lambda rate: losses[rate])
        if grid[0] < best < grid[-1] and math.isfinite(losses[best]):
            return Choice(best, grid)
        if extend == 0 or not math.isfinite(losses[best]):
            return Choice(None, grid, best)
        extend -= 1
        if best == grid[0]:
            grid = (_rounded(grid[0] ** 2 / grid[1]), *grid)
        else:
            grid = (*grid, _rounded(grid[-1] ** 2 / grid[-2]))
    return Choice(None, grid)


def _name(family: str, size: str, budget: float, seed: int, rate: float | None) -> str:
    """Return the name of a run's folder and of its wandb run; it ends with the learning rate."""
    return f"{family}_{size}_{budget:g}_seed{seed}_lr{rate or 0:g}"


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


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
        lists = {"overrides: ": experiment.overrides}
        lists |= {f"families.{k}.overrides: ": v.overrides for k, v in experiment.families.items()}
        lists |= {f"sizes.{k}.overrides: ": v.overrides for k, v in experiment.sizes.items()}
        for where, items in lists.items():
            for item in items:
                if "." not in item.partition("=")[0] or item.startswith("-"):
                    raise ConfigError(where.removesuffix(": "), item, "section.key=value")
            refuse_keys(items, OWN_KEYS, where)
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
            rank = max(1, shape.rank or shape.dim // 4) if found.low_rank else 0
            # Where the nonlinearities are is the family's; the ranks are the size's.
            settings = found.defaults("debug") | {"rank_attention": rank, "rank_ffn": rank}
            args = LlamaArgs(
                family=found.name,
                dim=shape.dim,
                ffn_dim=shape.ffn_dim,
                n_layers=shape.n_layers,
                n_heads=shape.n_heads,
                n_kv_heads=shape.n_kv_heads or None,
                vocab_size=shape.vocab_size,
                **settings,
            )
            path = self.work / "models" / f"{args.family}_{size}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_model_args(args, path)
            flavor = str(path)
        overrides = [*self.experiment.overrides, *shape.overrides, *arm.overrides]
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
        without = parts.total - parts.embedding - parts.head
        return Cost(
            counted=parts.total if self.experiment.count == "all" else without,
            width=run.args.dim,
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
            f"--lr_scheduler.warmup_steps={round(experiment.warmup * steps)}",
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
        experiment = self.experiment
        found: dict[tuple[str, str], Choice] = {}
        searching = [name for name, arm in experiment.families.items() if not arm.rate_of]
        for family in searching:
            for size in experiment.learning_rate.search:
                prefix = _name(family, size, *self._first(size), None).removesuffix("0")
                known = {
                    float(name.removeprefix(prefix)): loss
                    for name, loss in losses.items()
                    if name.startswith(prefix)
                }
                found[family, size] = search(
                    experiment.families[family].learning_rates,
                    known,
                    experiment.learning_rate.extend,
                )
            for size in experiment.sizes:
                if (family, size) not in found:
                    found[family, size] = Choice(self._by_rule(found, family, size))
        for family, arm in experiment.families.items():
            for size in experiment.sizes if arm.rate_of else ():
                found[family, size] = Choice(found[arm.rate_of, size].rate)
        return found

    def _first(self, size: str) -> tuple[float, int]:
        """Return the budget and the seed at which learning rates are searched."""
        shape = self.experiment.sizes[size]
        return shape.budgets[0], shape.seeds[0]

    def _by_rule(
        self, found: Mapping[tuple[str, str], Choice], family: str, size: str
    ) -> float | None:
        rates = {s: found[family, s].rate for s in self.experiment.learning_rate.search}
        known = {s: rate for s, rate in rates.items() if rate is not None}
        if len(known) < len(rates):
            return None
        own, rule = self.costs[family, size], self.experiment.learning_rate.rule
        largest = max(known, key=lambda s: self.costs[family, s].counted)
        if rule == "width":
            return _rounded(known[largest] * self.costs[family, largest].width / own.width)
        if rule == "power":
            import numpy as np

            logs = [np.log(self.costs[family, s].counted) for s in known]
            slope, offset = np.polyfit(logs, np.log(list(known.values())), 1)
            return _rounded(float(np.exp(offset + slope * np.log(own.counted))))
        return known[largest]

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
        found = [
            self.point(family, size, *self._first(size), rate)
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
