# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a model of an experiment costs: parameters, FLOPs, bytes and modelled seconds per step."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.config.shipped import find_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.experiment import Experiment
from torchtitan_lr.scaling.experiments import place_run
from torchtitan_lr.scaling.shapes import write_flavor

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
        parameters: All parameters.
        counted: N, the parameters of ``count``.
        width: Width d of the residual stream.
        flops_per_token: Forward and backward.
        tokens_per_step: Tokens of all ranks per optimizer step.
        bytes_per_step: Bytes that the busiest rank passes to its collectives per step.
        seconds_per_step: Modelled from products and collectives, on the experiment's hardware.
    """

    parameters: int
    counted: int
    width: int
    flops_per_token: int
    tokens_per_step: int
    bytes_per_step: float
    seconds_per_step: float

    @property
    def flops_per_step(self) -> float:
        """FLOPs of all ranks per optimizer step."""
        return float(self.flops_per_token) * self.tokens_per_step


def check_overrides(experiment: Experiment) -> None:
    """Refuse overrides of keys that the experiment sets.

    Raises:
        ConfigError: There is one, or one is not ``section.key=value``.
    """
    items = {"": experiment.overrides}
    items |= {f"families.{name}.": arm.overrides for name, arm in experiment.families.items()}
    items |= {f"sizes.{name}.": size.overrides for name, size in experiment.sizes.items()}
    for where, overrides in items.items():
        for item in overrides:
            key = item.partition("=")[0]
            if "." not in key or key.startswith("-"):
                raise ConfigError(f"{where}overrides", item, "section.key=value")
            if key.replace("-", "_") in OWN_KEYS:
                want = f"nothing: {OWN_KEYS[key.replace('-', '_')]}"
                raise ConfigError(f"{where}overrides: {key}", item, want)


def model_arguments(experiment: Experiment, family: str, size: str, models: Path) -> list[str]:
    """Return the overrides of a family at a size, and write its flavor file where it needs one.

    Args:
        experiment: The experiment.
        family: Name of the family.
        size: Name of the size.
        models: Folder of the flavor files.
    """
    arm, shape = experiment.families[family], experiment.sizes[size]
    overrides = [*experiment.overrides, *shape.overrides, *arm.overrides]
    name = arm.model or f"llama_{family}"
    flavor = shape.flavor or write_flavor(experiment, family, size, models)
    return [
        *(f"--{item}" for item in overrides),
        f"--model.name={name}",
        f"--model.flavor={flavor}",
    ]


def cost_of(experiment: Experiment, family: str, size: str, models: Path) -> Cost:
    """Return the cost of a family at a size.

    Raises:
        ConfigError: The run's configuration is not valid.
    """
    from torchtitan_lr.formulas.flops import flops_per_token
    from torchtitan_lr.formulas.parameters import count_parameters

    arguments = model_arguments(experiment, family, size, models)
    ranks = experiment.ranks_of(family)
    run = _placed(experiment, arguments, ranks, models)
    if not run.config.validation.enable:
        raise ConfigError("validation.enable", False, "true: the fit reads the validation loss")
    modelled = run
    if experiment.modelled_ranks:
        arguments += [f"--{item}" for item in experiment.modelled]
        modelled = _placed(experiment, arguments, experiment.modelled_ranks, models)
    sent, seconds = _modelled(experiment, modelled)
    parts = count_parameters(run.args)
    without = parts.total - parts.embedding - parts.head
    batches = run.microbatches * run.accumulation * run.shard * run.replicas
    return Cost(
        parameters=parts.total,
        counted=parts.total if experiment.count == "all" else without,
        width=run.args.dim,
        flops_per_token=flops_per_token(run.args, run.seq_len),
        tokens_per_step=run.tokens * batches,
        bytes_per_step=sent,
        seconds_per_step=seconds,
    )


def _placed(experiment: Experiment, arguments: list[str], ranks: int, models: Path) -> Any:
    """Return a run as the estimate reads it, checked."""
    from torchtitan_lr.estimate.run import read_run

    config = f"--job.config_file={find_config(experiment.config)}"
    folder = f"--job.dump_folder={models.parent / 'runs' / 'none'}"
    return read_run(place_run([config, folder, *arguments], ranks).config, ranks)


def _modelled(experiment: Experiment, run: Any) -> tuple[float, float]:
    """Return the bytes that the busiest rank sends per step, and the seconds of a step."""
    from torchtitan_lr.estimate.hardware import load_hardware
    from torchtitan_lr.estimate.timing import step_time
    from torchtitan_lr.estimate.traffic import bytes_by_dim

    hardware = load_hardware(experiment.hardware)
    traffic = [_average_traffic(run, pp_rank) for pp_rank in range(run.pp)]
    sent = [bytes_by_dim(rows, run.wire_dtypes) for rows in traffic]
    return float(max(map(_total, sent))), step_time(run, traffic, hardware).total


def _average_traffic(run: Any, pp_rank: int) -> list[Any]:
    """Return a rank's traffic in an average step, TSR-Adam's refreshes included."""
    from torchtitan_lr.estimate.traffic import average_optimizer_traffic, step_traffic

    rows = step_traffic(run, pp_rank)
    if run.tsr is None:
        return rows
    ordinary = [row for row in rows if row.scope != "step"]
    return [*ordinary, *average_optimizer_traffic(run, pp_rank)]


def _total(by_dim: dict[str, dict[str, int]]) -> int:
    return sum(size for ops in by_dim.values() for size in ops.values())


def measured_rate(device: str) -> float:
    """Return the FLOPs per second of large matrix products on one device: no run reaches it.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    import torch

    fast = device != "cpu"
    side, dtype = (4096, torch.bfloat16) if fast else (512, torch.float32)
    a = torch.randn(side, side, device=device, dtype=dtype)
    a @ a  # the first product loads kernels
    begin, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < 0.2:
        count += 10
        for _ in range(10):
            b = a @ a
        b[0, 0].item()  # waits for the device
        seconds = time.perf_counter() - begin
    return 2 * side**3 * count / seconds
