# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runs of an experiment: which there are, what they cost, and which have finished."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.config.shipped import find_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.costs import Cost, check_overrides, cost_of, model_arguments
from torchtitan_lr.scaling.experiment import Experiment
from torchtitan_lr.scaling.experiments import check_run
from torchtitan_lr.scaling.rates import Chosen, choose

RUN_FILE = "run.json"

FINISHED, DIVERGED = "finished", "diverged"


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        family: Its family.
        size: Its size.
        budget: Tokens per parameter.
        seed: ``debug.seed``.
        rate: Learning rate; None where a search is still to choose it.
    """

    family: str
    size: str
    budget: float
    seed: int
    rate: float | None

    @property
    def name(self) -> str:
        """Name of its folder and of its wandb run."""
        parts = (f"{self.budget:g}", f"seed{self.seed}", f"lr{self.rate or 0:g}")
        return "_".join((self.family, self.size, *parts))


class Plan:
    """An experiment with its runs and their results so far.

    Args:
        experiment: The experiment.
        work: Folder of all runs and results.
        sizes: Sizes of `missing`; empty for all.
    """

    def __init__(self, experiment: Experiment, work: Path, sizes: Sequence[str] = ()) -> None:
        check_overrides(experiment)
        self.experiment, self.work, self._only = experiment, work, sizes
        for size in sizes:
            if size not in experiment.sizes:
                raise ConfigError("--sizes", size, f"some of {', '.join(experiment.sizes)}")
        models = work / "models"
        pairs = [(family, size) for family in experiment.families for size in experiment.sizes]
        self._overrides_by_model = {
            pair: model_arguments(experiment, *pair, models) for pair in pairs
        }
        self.costs: dict[tuple[str, str], Cost] = {}
        for pair in pairs:
            self.costs[pair] = cost_of(experiment, *pair, models)
        self.records: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Read what is recorded of the runs in the folder."""
        for path in sorted(self.work.glob(f"runs/*/{RUN_FILE}")):
            self.records[path.parent.name] = json.loads(path.read_text())

    def steps(self, run: Run) -> int:
        """Return the optimizer steps of a run, at least one."""
        own = self.costs[run.family, run.size]
        experiment = self.experiment
        reference = self.costs[experiment.first, run.size]
        per_step: float = own.tokens_per_step
        tokens = run.budget * own.counted
        if experiment.equal != "tokens_per_parameter":
            tokens = run.budget * reference.counted
        if experiment.equal == "flops":
            tokens, per_step = tokens * reference.flops_per_token, own.flops_per_step
        return max(1, round(tokens / per_step))

    def arguments(self, run: Run) -> list[str]:
        """Return the overrides of a run."""
        steps, experiment = self.steps(run), self.experiment
        saving = ["--checkpoint.no_enable"]
        if experiment.checkpoints:
            interval = max(1, math.ceil(steps / experiment.checkpoints))
            saving = ["--checkpoint.enable", f"--checkpoint.interval={interval}"]
            saving.append("--checkpoint.keep_latest_k=2")
        tags = (run.family, run.size, f"tokens_per_parameter_{run.budget:g}", f"seed_{run.seed}")
        return [
            *saving,
            *self._overrides_by_model[run.family, run.size],
            f"--training.steps={steps}",
            f"--lr_scheduler.warmup_steps={round(experiment.warmup * steps)}",
            f"--validation.freq={steps}",
            f"--optimizer.lr={run.rate:g}",
            f"--debug.seed={run.seed}",
            f"--metrics.wandb_group={experiment.name}",
            f"--metrics.wandb_run_name={run.name}",
            f"--metrics.wandb_tags={','.join(tags)}",
        ]

    def check(self) -> None:
        """Check the configuration of every family, size and budget before anything starts.

        Raises:
            ConfigError: A configuration is not valid, or a run's folder has other settings.
        """
        for family, size in self.costs:
            rate = self.experiment.grid_of(family)[0]
            seed = self.experiment.seeds_of(size)[0]
            for budget in self.experiment.budgets_of(size):
                run = Run(family, size, budget, seed, rate)
                folder = f"--job.dump_folder={self.folder(run)}"
                config = f"--job.config_file={find_config(self.experiment.config)}"
                check_run([config, *self.arguments(run), folder], self.experiment.ranks_of(family))
        for run in self.runs():
            record = self.records.get(run.name)
            if record is not None and record["arguments"] != self.arguments(run):
                want = f"a folder without a run {run.name} of other settings"
                raise ConfigError("--out", str(self.work), want)

    def folder(self, run: Run) -> Path:
        """Return the dump folder of a run."""
        return self.work / "runs" / run.name

    def chosen(self) -> dict[tuple[str, str], Chosen]:
        """Return the learning rates as far as the finished runs determine them."""
        return choose(self.experiment, self.costs, self._searched)

    def _searched(self, family: str, size: str) -> dict[float, float]:
        """Return the losses of a search by learning rate: of the first budget and seed."""
        losses = {}
        for record in self.records.values():
            found = Run(**record["run"])
            if found.rate is None or record["status"] not in (FINISHED, DIVERGED):
                continue
            if found == self._search_run(family, size, found.rate):
                loss = record["row"].get("val_loss")
                losses[found.rate] = math.inf if loss is None else float(loss)
        return losses

    def _search_run(self, family: str, size: str, rate: float) -> Run:
        budget = self.experiment.budgets_of(size)[0]
        return Run(family, size, budget, self.experiment.seeds_of(size)[0], rate)

    def runs(self) -> list[Run]:
        """Return all runs that are known, those of searches first; unknown rates are None."""
        found: dict[Run, None] = {}
        chosen = self.chosen()
        for (family, size), choice in chosen.items():
            if choice.search is not None and len(choice.search.grid) > 1:
                for rate in choice.search.grid:
                    found[self._search_run(family, size, rate)] = None
        return [*found, *(run for run in self.main_runs(chosen) if run not in found)]

    def main_runs(self, chosen: dict[tuple[str, str], Chosen] | None = None) -> list[Run]:
        """Return the runs that the fit uses: all budgets and seeds at the chosen rates.

        Args:
            chosen: Returned by `chosen`, if it is at hand.
        """
        chosen = self.chosen() if chosen is None else chosen
        return [
            Run(family, size, budget, seed, chosen[family, size].rate)
            for family, size in self.costs
            for budget in self.experiment.budgets_of(size)
            for seed in self.experiment.seeds_of(size)
        ]

    def missing(self) -> list[Run]:
        """Return the runs that can start now, cheapest first: of a known rate and not finished."""
        runs = [run for run in self.runs() if run.rate is not None and not self.is_done(run)]
        runs = [run for run in runs if not self._only or run.size in self._only]
        return sorted(runs, key=self.flops)

    def is_done(self, run: Run) -> bool:
        """Return whether a run has a result."""
        return self.records.get(run.name, {}).get("status") in (FINISHED, DIVERGED)

    def flops(self, run: Run) -> float:
        """Return C, the FLOPs of a run on all ranks."""
        return self.steps(run) * self.costs[run.family, run.size].flops_per_step

    def tokens(self, run: Run) -> float:
        """Return D, the tokens of a run."""
        return float(self.steps(run) * self.costs[run.family, run.size].tokens_per_step)

    def rate(self) -> tuple[float, str]:
        """Return the FLOPs per second of one run, 0 if none is known, and where they come from."""
        rates = []
        for record in self.records.values():
            if record["status"] == FINISHED and record["row"].get("seconds"):
                rates.append(record["row"]["flops"] / record["row"]["seconds"])
        if rates:
            return median(rates), f"the median of {len(rates)} finished runs"
        if self.experiment.flops_per_second:
            return self.experiment.flops_per_second, "stated in flops_per_second"
        return 0.0, ""

    def commits(self, runs: Sequence[Run] | None = None) -> dict[str, int]:
        """Return the number of runs by the commit that they were started with.

        Args:
            runs: Runs to count; by default all that are recorded.
        """
        names = self.records if runs is None else [run.name for run in runs]
        counts: dict[str, int] = {}
        for name in names:
            if name in self.records:
                for commit in self.records[name]["commits"]:
                    counts[commit] = counts.get(commit, 0) + 1
        return counts
