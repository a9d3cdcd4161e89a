# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runs of an experiment as points of a sweep: models, lengths and learning rates.

Rates are searched at the first budget and seed of a size; points follow from known losses.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.experiments.experiment import Experiment
from torchtitan_lr.experiments.start import place_run
from torchtitan_lr.experiments.sweep import OWN_KEYS, Point, refuse_keys

EXPERIMENT_KEYS = (
    *(*OWN_KEYS, "model.name", "model.flavor", "training.steps", "lr_scheduler.warmup_steps"),
    *("optimizer.lr", "debug.seed", "validation.freq", "metrics.wandb_tags"),
)
"""Keys that the experiment sets for each run."""

WIDENED = 8  # rates by which a search goes beyond either end of its grid, before it is given up

Pair = tuple[str, str]
"""A family and a size."""


@dataclass(frozen=True)
class Arm:
    """A family at a size."""

    overrides: list[str]  # of its runs, the model's included
    counted: int  # N, the parameters without embedding and head
    # Forward and backward, without recomputation, and a spectral optimizer's products
    flops_per_token: float
    tokens_per_step: int  # tokens of all ranks per optimizer step


@dataclass
class Searched:
    """What the known losses say of the searches."""

    points: list[Point] = field(default_factory=list)  # of the searches; some several times
    # The chosen learning rates; None while it is unknown, or if a search is given up
    rates: dict[Pair, float | None] = field(default_factory=dict)
    edges: list[str] = field(default_factory=list)  # the searches that are given up


def rate_at(grid: Sequence[float], place: int) -> float:
    """Return a rate of a grid; places beyond its ends go on with the ratio of its last two."""
    if 0 <= place < len(grid):
        return grid[place]
    end, beside, far = (0, 1, -place) if place < 0 else (-1, -2, place - len(grid) + 1)
    return float(f"{grid[end] * (grid[end] / grid[beside]) ** far:.3g}")


class Plan:
    """An experiment with every family at every size."""

    def __init__(self, experiment: Experiment, work: Path) -> None:
        self.experiment, self.work = experiment, work
        self._config = find_config(experiment.config)
        for name, family in experiment.families.items():
            refuse_keys(family.overrides, EXPERIMENT_KEYS, f"families.{name}.overrides: ")
        self.arms: dict[Pair, Arm] = {}
        for pair in product(experiment.families, experiment.sizes):
            try:
                self.arms[pair] = self._arm(*pair)
            except ConfigError as error:
                key = f"families.{pair[0]}: {error.key}"
                raise ConfigError(key, error.got, error.want) from error
        equal = experiment.equal
        self.measures = ["tokens", "flops"] if equal == "both" else [equal]

    def _arm(self, name: str, size: str) -> Arm:
        """Read the configuration of a family at a size; write the file of a flavor that is new."""
        from torchtitan_lr.costs.described_run import read_run
        from torchtitan_lr.models.args import LlamaArgs
        from torchtitan_lr.models.families import find_family
        from torchtitan_lr.models.flavors import write_model_args

        family, shape = self.experiment.families[name], self.experiment.sizes[size]
        overrides = [f"--{item}" for item in family.overrides]
        overrides.append(f"--model.name={family.model}")
        config = f"--job.config_file={self._config}"
        build_job_config([config, *overrides])  # imports the family's module
        found, flavor = find_family(family.model), shape.flavor
        if found is not None and not flavor:
            rank = max(1, shape.dim // 4) if found.low_rank else 0
            # The family says where the nonlinearities are, the size which ranks.
            settings = found.defaults("debug", rank) | {"rank_attention": rank, "rank_ffn": rank}
            sides = ("dim", "ffn_dim", "n_layers", "n_heads", "vocab_size")
            settings |= {side: getattr(shape, side) for side in sides}
            path = self.work / "models" / f"{found.name}_{size}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_model_args(LlamaArgs(family=found.name, **settings), path)
            flavor = str(path)
        overrides.append(f"--model.flavor={flavor}")
        # The highest rate: what is refused or warned of is a rate that runs have.
        own = [f"--job.dump_folder={self.work / 'none'}"]
        own.append(f"--optimizer.lr={family.learning_rates[-1]}")
        placed = place_run([config, *own, *overrides], family.ranks, data="none")
        validated = placed.config.validation.enable
        require(validated, "validation.enable", False, "true: the fit reads the validation loss")
        run = read_run(placed.config, family.ranks)
        total, flops = run.size
        counted = total - 2 * run.args.vocab_size * run.args.dim  # the embedding, the head
        tokens = run.tokens_per_step
        return Arm(overrides, counted, flops + run.optimizer.model_flops() / tokens, tokens)

    def point(
        self, family: str, size: str, budget: float, seed: int, rate: float | None, equal: str = ""
    ) -> Point:
        """Return a run as a point of a sweep, with N, the tokens D and all ranks' FLOPs."""
        arm, (first, *others) = self.arms[family, size], self.measures
        steps = self._steps(family, size, budget, equal or first)
        name = f"{family}_{size}_{budget:g}_seed{seed}_lr{rate or 0:g}"
        if equal in others and steps != self._steps(family, size, budget, first):
            name += f"_{equal}"
        arguments = [
            *("--checkpoint.enable", f"--checkpoint.interval={math.ceil(steps / 4)}"),
            *("--checkpoint.keep_latest_k=2", *arm.overrides),
            *(f"--training.steps={steps}", f"--validation.freq={steps}"),
            f"--lr_scheduler.warmup_steps={round(self.experiment.warmup * steps)}",
            *(f"--optimizer.lr={rate}", f"--debug.seed={seed}"),
            f"--metrics.wandb_group={self.experiment.name}",
            f"--metrics.wandb_run_name={name}",
            f"--metrics.wandb_tags={family},{size},tokens_per_parameter_{budget:g},seed_{seed}",
        ]
        tokens = steps * arm.tokens_per_step
        settings = {"family": family, "size": size, "tokens_per_parameter": budget, "seed": seed}
        settings |= {"equal": equal or first, "learning_rate": rate}
        settings |= {"N": arm.counted, "D": tokens}
        settings["FLOPs"] = float(tokens) * arm.flops_per_token
        ranks = self.experiment.families[family].ranks
        return Point(name, self._config, arguments, settings, ranks)

    def _steps(self, family: str, size: str, budget: float, equal: str) -> int:
        """Return the steps at which a family shares ``equal`` with the reference."""
        arm, reference = self.arms[family, size], self.arms[self.experiment.reference, size]
        wanted = budget * reference.counted
        if equal == "tokens_per_parameter":
            wanted = budget * arm.counted
        if equal == "flops":
            wanted *= reference.flops_per_token / arm.flops_per_token
        return max(1, round(wanted / arm.tokens_per_step))

    def searched(self, losses: Mapping[str, float]) -> Searched:
        """Return what losses by a point's name say: rates, and the points that searches need."""
        found = Searched()
        for family, given in self.experiment.families.items():
            grid = given.learning_rates
            rate = None if len(grid) > 1 else grid[0]
            found.rates |= {(family, size): rate for size in self.experiment.sizes}
            if rate is None:
                self._search(family, losses, found)
        return found

    def _search(self, family: str, losses: Mapping[str, float], found: Searched) -> None:
        """Add the search of a family: size after size, as far as losses are known.

        The first size tries all rates of the grid, a later size the best rate of the size before it
        and the two rates beside. Each goes on, also beyond the ends of the grid, until its own best
        rate has both neighbours.
        """
        grid, rate = self.experiment.families[family].learning_rates, None
        tried = {*range(len(grid))}
        for size in self.experiment.search:
            shape = self.experiment.sizes[size]
            beside: set[int] = set()
            while not beside or not beside <= tried:
                tried |= beside
                known = {}
                for place in sorted(tried):
                    at = rate_at(grid, place)
                    point = self.point(family, size, shape.budgets[0], shape.seeds[0], at)
                    found.points.append(point)
                    if point.name in losses:
                        known[place] = losses[point.name]
                if len(known) < len(tried):
                    return  # until these runs have ended
                best = min(known, key=lambda place: known[place])
                rate = rate_at(grid, best)
                if best in (-WIDENED, len(grid) - 1 + WIDENED):
                    text = f"{family} {size}: the best learning rate is {rate:g} or beyond it: "
                    found.edges.append(text + f"give families.{family}.learning_rates around it")
                    return
                beside = {best - 1, best, best + 1}
            found.rates[family, size] = rate
            tried = beside
        for size in self.experiment.sizes:
            if size not in self.experiment.search:
                found.rates[family, size] = rate

    def main_points(self, rates: Mapping[Pair, float | None]) -> list[Point]:
        """Return the points that a fit uses: all budgets and seeds, at the chosen rates or None."""
        points = []
        for family, size in self.arms:
            of_size = self.experiment.sizes[size]
            for budget, equal, seed in product(of_size.budgets, self.measures, of_size.seeds):
                rate = rates[family, size]
                points.append(self.point(family, size, budget, seed, rate, equal))
        return points

    def points(self, searched: Searched) -> list[Point]:
        """Return the points that can start: of searches, and of known rates; cheapest first."""
        main = self.main_points(searched.rates)
        started = [point for point in main if point.settings["learning_rate"] is not None]
        different = {point.name: point for point in [*searched.points, *started]}
        return sorted(different.values(), key=lambda point: float(point.settings["FLOPs"]))
