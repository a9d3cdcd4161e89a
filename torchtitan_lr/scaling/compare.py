# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs of a cost comparison: their selection, their arguments, and one table row for each."""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.formulas.papers.published import BOOST_ITERATION_SECONDS, BoostRun
from torchtitan_lr.scaling.experiments import launch, step_records
from torchtitan_lr.scaling.timing import MEASUREMENT_FILE, WATCHED_STEPS, row_of
from torchtitan_lr.scaling.variants import derive, read_modes, shared_mode

TABLES_CONFIG = "train_configs/boost_3b.toml"
QUIET = [
    *("--metrics.log_freq=1", "--metrics.no_comm_ledger", "--metrics.no_enable_tensorboard"),
    *("--metrics.no_enable_wandb", "--validation.no_enable", "--checkpoint.no_enable"),
]


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        name: Name of the run.
        config: Its TOML file.
        arguments: Overrides of the TOML.
        checkpointing: Its mode of activation checkpointing.
        ranks: Number of processes; None for NGPU.
        published: The paper's seconds per step.
    """

    name: str
    config: str
    arguments: list[str]
    checkpointing: str
    ranks: int | None = None
    published: float | None = None


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the runs to measure.

    Raises:
        ConfigError: A TOML cannot be read, two have the same name, or modes of activation
            checkpointing differ without having been named.
    """
    if options.tables:
        return table_cases(options)
    if len(options.configs) > 1:
        return file_cases(options)
    (config,) = options.configs
    overrides = options.overrides
    named = read_modes(options.checkpointing, options.plans)
    shared = shared_mode(configured_mode(config, overrides), options.plans)
    return [
        Case(p, config, [*overrides, *derive(config, p, overrides)], named.get(p, shared))
        for p in options.plans
    ]


def configured_mode(config: str, overrides: list[str]) -> str:
    """Return a TOML's mode of activation checkpointing, overrides included."""
    given = build_job_config([f"--job.config_file={config}", *overrides])
    return str(given.activation_checkpoint.mode)


def file_cases(options: argparse.Namespace) -> list[Case]:
    """Return the runs of several TOMLs, unchanged; their modes of checkpointing must be equal."""
    configs = {Path(config).stem: config for config in options.configs}
    for name, times in Counter(Path(config).stem for config in options.configs).items():
        if times > 1:
            raise ConfigError("CONFIG", name, "files of different names")
    named = read_modes(options.checkpointing, configs)
    modes = {name: configured_mode(file, options.overrides) for name, file in configs.items()}
    if len({mode for name, mode in modes.items() if name not in named}) > 1:
        got = ",".join(f"{name}={mode}" for name, mode in modes.items())
        want = f"one mode for all, or those of single files named: --checkpointing {got}"
        raise ConfigError("activation_checkpoint.mode", got, want)
    modes |= named
    return [Case(name, file, options.overrides, modes[name]) for name, file in configs.items()]


def table_cases(options: argparse.Namespace) -> list[Case]:
    """Return the runs of BOOST's Figure 6 (left) that fit this machine's GPUs."""
    import torch

    cases, gpus = [], torch.cuda.device_count()
    named = read_modes(options.checkpointing, ("full", "vanilla_replicated", "btp"))
    for row in BOOST_ITERATION_SECONDS:
        if row.ranks > gpus:
            print(f"skipped: {row.flavor} needs {row.ranks} GPUs, this machine has {gpus}")
            continue
        plans = {"full": row.full, "vanilla_replicated": row.vanilla, "btp": row.boost}
        for plan, seconds in plans.items():
            arguments = [*boost_arguments(row), *options.overrides]
            shared = shared_mode(configured_mode(TABLES_CONFIG, arguments), plans)
            arguments += derive(TABLES_CONFIG, plan, arguments)
            name, mode = f"{row.flavor} {plan}", named.get(plan, shared)
            cases.append(Case(name, TABLES_CONFIG, arguments, mode, row.ranks, seconds))
    return cases


def boost_arguments(row: BoostRun) -> list[str]:
    """Return BOOST's setting: pure bf16, 4 sequences of 4096 tokens, no recomputation.

    Text and tokenizer come with this package, so that nothing is downloaded; the vocabulary size is
    the flavor's.
    """
    return [
        f"--model.flavor={row.flavor}",
        "--model.hf_assets_path=torchtitan_lr/data/assets/bpe4k",
        "--training.dataset=python_stdlib",
        *("--training.local_batch_size=4", "--training.global_batch_size=4"),
        *("--training.seq_len=4096", "--training.dtype=bfloat16", "--compile.no_enable"),
        "--activation_checkpoint.mode=none",
        f"--parallelism.tensor_parallel_degree={row.tensor_parallel}",
        f"--parallelism.pipeline_parallel_degree={row.pipeline_parallel}",
    ]


def arguments_of(case: Case, options: argparse.Namespace) -> list[str]:
    """Return all command-line overrides of a run."""
    steps = options.warmup + options.steps + WATCHED_STEPS
    length = [f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={steps // 2}"]
    mode = f"--activation_checkpoint.mode={case.checkpointing}"
    return [*case.arguments, mode, *QUIET, *length]


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case and return its table row.

    Raises:
        RunFailedError: The run failed.
    """
    folder = Path(options.work) / case.name.replace(" ", "_")
    (folder / MEASUREMENT_FILE).unlink(missing_ok=True)
    module = {"TRAIN_FILE": "torchtitan_lr.scaling.measure"}
    launch(case.config, folder, arguments_of(case, options), case.ranks, module)
    found = json.loads((folder / MEASUREMENT_FILE).read_text())
    timed = [
        record
        for record in step_records(folder)
        if options.warmup < record["step"] <= options.warmup + options.steps
    ]
    row = row_of(case.name, case.checkpointing, timed, found)
    return row | {"published_seconds": case.published}
