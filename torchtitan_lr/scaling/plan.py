# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runs of a scaling experiment as points of a sweep: models, lengths and learning rates.

Rates are searched at the first budget and seed of a size; points follow from known losses.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import numpy as np

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.scaling.experiment import Experiment
from torchtitan_lr.scaling.start import place_run
from torchtitan_lr.scaling.sweep import Point, refuse_keys

EXPERIMENT_KEYS = dict.fromkeys(
    [
        *("job.dump_folder", "job.config_file", "model.name", "model.flavor", "training.steps"),
        *("lr_scheduler.warmup_steps", "optimizer.lr", "debug.seed", "validation.freq"),
        *("metrics.wandb_group", "metrics.wandb_run_name", "metrics.wandb_tags"),
    ],
    "the experiment sets it for each run",
)
"""Keys that cannot be overridden, and why."""

WARMUP = 0.1  # share of the steps in which the learning rate grows
WIDENED = 8  # rates by which a search goes beyond either end of its grid, before it is given up

Rates = Mapping[tuple[str, str], float | None]
"""Learning rate by family and size; None while it is unknown, or if a search is given up."""


Searches = Mapping[tuple[str, str], list[Point]]
"""The points that search a learning rate, by family and size."""


@dataclass(frozen=True)
class Cost:
    """The model of a family at a size."""

    counted: int  # N, the parameters without embedding and head
    # Forward and backward, without recomputation, and a spectral optimizer's products
    flops_per_token: float
    tokens_per_step: int  # tokens of all ranks per optimizer step


def rate_at(grid: Sequence[float], place: int) -> float:
    """Return a rate of a grid; places beyond its ends go on with the ratio of its last two."""
    if 0 <= place < len(grid):
        return grid[place]
    if len(grid) == 1:
        return grid[0]
    end, beside, far = (0, 1, -place) if place < 0 else (-1, -2, place - len(grid) + 1)
    return float(f"{grid[end] * (grid[end] / grid[beside]) ** far:.3g}")


class Plan:
    """An experiment with the cost of every family at every size."""

    def __init__(self, experiment: Experiment, work: Path) -> None:
        self.experiment, self.work = experiment, work
        self._config = find_config(experiment.config)
        refuse_keys(experiment.overrides, EXPERIMENT_KEYS, "overrides: ")
        for name, family in experiment.families.items():
            refuse_keys(family.overrides, EXPERIMENT_KEYS, f"families.{name}.overrides: ")
        self._overrides: dict[tuple[str, str], list[str]] = {}
        self.costs: dict[tuple[str, str], Cost] = {}
        for pair in product(experiment.families, experiment.sizes):
            try:
                self._overrides[pair] = self._model(*pair)
                self.costs[pair] = self._cost(*pair)
            except ConfigError as error:
                if error.key.startswith(("families.", "sizes.")):
                    raise
                key = f"families.{pair[0]}: {error.key}"
                raise ConfigError(key, error.got, error.want) from error
        equal = experiment.equal
        self.measures = ["tokens", "flops"] if equal == "both" else [equal]

    def _model(self, family: str, size: str) -> list[str]:
        """Return the overrides of a family at a size; write the file of a flavor that is new."""
        from torchtitan_lr.models.args import LlamaArgs
        from torchtitan_lr.models.families import FAMILIES, find_family
        from torchtitan_lr.models.flavors import write_model_args

        arm, shape = self.experiment.families[family], self.experiment.sizes[size]
        overrides = [f"--{item}" for item in arm.overrides]
        build_job_config([f"--job.config_file={self._config}", *overrides])  # imports its module
        found, flavor = find_family(arm.model), shape.flavor
        if found is None:
            want = one_of((known.model_name for known in FAMILIES.values()), arm.model)
            raise ConfigError(f"families.{family}.model", arm.model, want)
        if not flavor:
            rank = max(1, shape.dim // 4) if found.low_rank else 0
            # The family says where the nonlinearities are, the size which ranks.
            settings = found.defaults("debug", rank) | {"rank_attention": rank, "rank_ffn": rank}
            sides = ("dim", "ffn_dim", "n_layers", "n_heads", "vocab_size")
            settings |= {side: getattr(shape, side) for side in sides}
            path = self.work / "models" / f"{found.name}_{size}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_model_args(LlamaArgs(family=found.name, **settings), path)
            flavor = str(path)
        return [*overrides, f"--model.name={arm.model}", f"--model.flavor={flavor}"]

    def _cost(self, family: str, size: str) -> Cost:
        from torchtitan_lr.costs.described_run import read_run
        from torchtitan_lr.models.configured import empty_model

        own = [f"--job.config_file={self._config}", f"--job.dump_folder={self.work / 'none'}"]
        arm = self.experiment.families[family]
        # The highest one: what is refused or warned of is a rate that runs have.
        own.append(f"--optimizer.lr={arm.learning_rates[-1]}")
        placed = place_run([*own, *self._overrides[family, size]], arm.ranks, data="none")
        if not placed.config.validation.enable:
            raise ConfigError("validation.enable", False, "true: the fit reads the validation loss")
        run = read_run(placed.config, arm.ranks)
        total, flops = run.args.get_nparams_and_flops(empty_model(run.args), run.seq_len)
        counted = total - 2 * run.args.vocab_size * run.args.dim  # the embedding, the head
        tokens = run.tokens_per_step
        return Cost(counted, flops + run.optimizer.model_flops() / tokens, tokens)

    def point(
        self, family: str, size: str, budget: float, seed: int, rate: float | None, equal: str = ""
    ) -> Point:
        """Return a run as a point of a sweep, with N, the tokens D and all ranks' FLOPs."""
        experiment, cost = self.experiment, self.costs[family, size]
        first, *others = self.measures
        steps = self._steps(family, size, budget, equal or first)
        name = f"{family}_{size}_{budget:g}_seed{seed}_lr{rate or 0:g}"
        if equal in others and steps != self._steps(family, size, budget, first):
            name += f"_{equal}"
        arguments = [
            *("--checkpoint.enable", f"--checkpoint.interval={math.ceil(steps / 4)}"),
            *("--checkpoint.keep_latest_k=2", *self._overrides[family, size]),
            *(f"--training.steps={steps}", f"--validation.freq={steps}"),
            f"--lr_scheduler.warmup_steps={round(WARMUP * steps)}",
            *(f"--optimizer.lr={rate}", f"--debug.seed={seed}"),
            *(f"--metrics.wandb_group={experiment.name}", f"--metrics.wandb_run_name={name}"),
            f"--metrics.wandb_tags={family},{size},tokens_per_parameter_{budget:g},seed_{seed}",
        ]
        tokens = steps * cost.tokens_per_step
        settings = {"family": family, "size": size, "tokens_per_parameter": budget, "seed": seed}
        settings |= {"equal": equal or first, "learning_rate": rate}
        settings |= {"N": cost.counted, "D": tokens}
        settings["FLOPs"] = float(tokens) * cost.flops_per_token
        return Point(name, self._config, arguments, settings, experiment.families[family].ranks)

    def _steps(self, family: str, size: str, budget: float, equal: str) -> int:
        """Return the steps at which a family shares ``equal`` with the reference."""
        cost, reference = self.costs[family, size], self.costs[self.experiment.reference, size]
        wanted = budget * reference.counted
        if equal == "tokens_per_parameter":
            wanted = budget * cost.counted
        if equal == "flops":
            wanted *= reference.flops_per_token / cost.flops_per_token
        steps = max(1, round(wanted / cost.tokens_per_step))
        want = f"fewer tokens per parameter: a run of {family} has {float(steps):.3g} steps"
        require(steps < 2**63, f"sizes.{size}", budget, want)
        return steps

    def searches(self, losses: Mapping[str, float]) -> Searches:
        """Return the points of every search, in the order of the grid.

        A family's first size tries all its rates, a later size the best rate of the size before it
        and the two rates beside. Each goes on, also beyond the ends of its grid, until its own best
        rate has both neighbours. A size whose size before has not chosen yet has none.
        """
        found: dict[tuple[str, str], list[Point]] = {}
        for family, arm in self.experiment.families.items():
            grid = arm.learning_rates
            places = range(-WIDENED, len(grid) + WIDENED)
            tried = set(range(len(grid)))
            for size in self.experiment.search:
                shape = self.experiment.sizes[size]
                first = shape.budgets[0], shape.seeds[0]
                points = {k: self.point(family, size, *first, rate_at(grid, k)) for k in places}
                known = {k: losses[p.name] for k, p in points.items() if p.name in losses}
                beside: set[int] = set()
                if tried and tried <= known.keys():
                    best = min(known, key=lambda place: known[place])
                    beside = {best - 1, best, best + 1} & {*places}
                    tried = tried | beside
                found[family, size] = [points[place] for place in sorted(tried)]
                tried = beside if beside <= known.keys() else set()
        return found

    def rates(self, searches: Searches, losses: Mapping[str, float]) -> tuple[Rates, list[str]]:
        """Choose every rate that finished runs determine; say of each search that is given up."""
        found: dict[tuple[str, str], float | None] = {}
        edges = []
        for (family, size), points in searches.items():
            grid = self.experiment.families[family].learning_rates
            best = None
            if points and all(point.name in losses for point in points):
                lowest = min(points, key=lambda point: losses[point.name])
                best = lowest.settings["learning_rate"]
            ends = [rate_at(grid, place) for place in (-WIDENED, len(grid) - 1 + WIDENED)]
            if len(grid) > 1 and best in ends:
                text = f"{family} {size}: the best learning rate is {best:g} or beyond it: "
                edges.append(text + f"give families.{family}.learning_rates around it")
                best = None
            found[family, size] = grid[0] if len(grid) == 1 else best
        for family, size in self.costs:
            if (family, size) not in found:
                found[family, size] = self._beyond(found, family, size)
        return found, edges

    def _beyond(self, rates: Rates, family: str, size: str) -> float | None:
        """Return the rate of a size without a search, by a line through three searched or more."""
        searched = self.experiment.search
        known = [rate for s in searched if (rate := rates[family, s]) is not None]
        if len(known) < len(searched):
            return None
        if len(known) < 3:
            return known[-1]
        sizes = [math.log(self.costs[family, s].counted) for s in searched]
        slope, offset = np.polyfit(sizes, np.log(known), 1)
        value = math.exp(offset + slope * math.log(self.costs[family, size].counted))
        return float(f"{value:.3g}")

    def main_points(self, rates: Rates) -> list[Point]:
        """Return the points that a fit uses: all budgets and seeds, at the chosen rates or None."""
        points = []
        for family, size in self.costs:
            of_size = self.experiment.sizes[size]
            for budget, equal, seed in product(of_size.budgets, self.measures, of_size.seeds):
                rate = rates[family, size]
                points.append(self.point(family, size, budget, seed, rate, equal))
        return points

    def points(self, searches: Searches, rates: Rates) -> list[Point]:
        """Return the points that can start: of searches, and of known rates; cheapest first."""
        found = list(chain.from_iterable(searches.values()))
        for point in self.main_points(rates):
            if point.settings["learning_rate"] is not None:
                found.append(point)
        different = {point.name: point for point in found}
        return sorted(different.values(), key=lambda point: float(point.settings["FLOPs"]))
