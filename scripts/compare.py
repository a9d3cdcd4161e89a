# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Trains a few steps under several plans and puts their cost side by side.

With one CONFIG, three runs are derived from it: full rank (Megatron's plan), the low-rank model
under the vanilla plan, and under the bottleneck-aware one. With several CONFIGs, each is run as it
is. The runs follow one another on NGPU ranks of this machine (default 4: GPUs, or processes where
there are too few). Further arguments, --section.key=value, go to all runs.

All runs have one mode of activation checkpointing, which the results name: the TOML's, or "full"
where that is "low_rank" and full rank, which has none, is among the runs. Several CONFIGs of
different modes are refused. --checkpointing gives single runs another mode.

    python scripts/compare.py train_configs/debug_cola.toml
    NGPU=4 python scripts/compare.py A.toml B.toml --steps 20 --training.seq_len=256
    python scripts/compare.py train_configs/debug_cola.toml --checkpointing full=full,btp=low_rank
    python scripts/compare.py --tables       # BOOST's Figure 6 (left), on as many GPUs as there are

Reported are the median seconds of a step and their range, tokens a second of all ranks, MFU from
the model's own FLOPs (- where the device's peak is unknown), bytes of all collectives of a step
(elements once per call times item size, rank 0), the time in which collectives ran (mean of the
ranks, waiting included, computation may overlap), and the largest rank's peak memory. Bytes and
communication time come from two more steps at the end, which are not timed. The table is printed;
compare.json and compare.png are written to --work.

Exit status: 0 all ran, 1 a run failed, 2 something is refused.
"""

import argparse
import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.formulas.papers.published import BOOST_ITERATION_SECONDS, BoostRun
from torchtitan_lr.tools.cli import OneLineParser
from torchtitan_lr.tools.experiments import (
    RunFailedError,
    check_run,
    launch,
    on_signals_stop,
    step_records,
)
from torchtitan_lr.tools.timing import MEASUREMENT_FILE, WATCHED_STEPS, as_text, draw, row_of
from torchtitan_lr.tools.variants import PLANS, derive, known_plans, read_modes, shared_mode

TABLES_CONFIG = "train_configs/boost_3b.toml"
QUIET = [
    *("--metrics.log_freq=1", "--metrics.no_comm_ledger", "--metrics.no_enable_tensorboard"),
    *("--metrics.no_enable_wandb", "--validation.no_enable", "--checkpoint.no_enable"),
]


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        name: Of the run.
        config: Its TOML.
        arguments: What overrides that.
        checkpointing: Its mode of activation checkpointing.
        ranks: Processes; None for NGPU.
        published: Seconds of a step that the paper prints.
    """

    name: str
    config: str
    arguments: list[str]
    checkpointing: str
    ranks: int | None = None
    published: float | None = None


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return what to run.

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
    """Return the runs of several TOMLs as they are; their modes of checkpointing must agree."""
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
    """Return BOOST's setting: pure bf16, sequences of 4096 tokens, 4 a batch, nothing recomputed.

    Text and tokenizer are those of this package, so that nothing is downloaded; the vocabulary
    stays the flavor's.
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
    """Return all overrides of a run."""
    steps = options.warmup + options.steps + WATCHED_STEPS
    length = [f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={steps // 2}"]
    mode = f"--activation_checkpoint.mode={case.checkpointing}"
    return [*case.arguments, mode, *QUIET, *length]


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case; return its row of the table.

    Raises:
        RunFailedError: It failed.
    """
    folder = Path(options.work) / case.name.replace(" ", "_")
    (folder / MEASUREMENT_FILE).unlink(missing_ok=True)
    module = {"TRAIN_FILE": "torchtitan_lr.tools.measure"}
    launch(case.config, folder, arguments_of(case, options), case.ranks, module)
    found = json.loads((folder / MEASUREMENT_FILE).read_text())
    timed = [
        record
        for record in step_records(folder)
        if options.warmup < record["step"] <= options.warmup + options.steps
    ]
    row = row_of(case.name, case.checkpointing, timed, found)
    return row | {"published_seconds": case.published}


def main(argv: list[str] | None = None) -> int:
    """Check everything, run everything, report."""
    options = _parse(argv)
    try:
        cases = cases_of(options)
        for case in cases:
            arguments = [f"--job.config_file={case.config}", *arguments_of(case, options)]
            check_run(arguments, case.ranks)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not cases:
        print("skipped: no run of --tables fits this machine")
        return 0
    on_signals_stop()
    rows, failed = [], 0
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        try:
            rows.append(measure(case, options))
        except RunFailedError as error:
            failed += 1
            print(f"{case.name}: {error}", file=sys.stderr)
    if rows:
        work = Path(options.work)
        (work / "compare.json").write_text(json.dumps(rows, indent=1) + "\n")
        draw(rows, work / "compare.png")
        print(json.dumps(rows, indent=1) if options.json else as_text(rows))
    return 1 if failed else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("configs", metavar="CONFIG", nargs="*", help="TOML files")
    parser.add_argument("--steps", type=int, default=10, help="steps to time (default 10)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument(
        "--plans",
        default="full,vanilla,btp",
        help=f"with one CONFIG: some of {','.join(PLANS)} (default full,vanilla,btp)",
    )
    parser.add_argument(
        "--checkpointing",
        default="",
        metavar="RUN=MODE,...",
        help="modes of activation checkpointing of single runs (default: one mode for all)",
    )
    parser.add_argument("--tables", action="store_true", help="the paper's runs; takes no CONFIG")
    parser.add_argument("--work", default="outputs/compare", help="folder of runs and results")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options, overrides = parser.parse_known_args(argv)
    parser.check_overrides(overrides)
    options.overrides = overrides
    parser.check_at_least(options, steps=1, warmup=0)
    options.plans = options.plans.split(",")
    known: tuple[str, ...] = PLANS
    if len(options.configs) == 1 and not set(options.plans) <= set(known):
        with suppress(ConfigError):  # it is reported below
            known = known_plans(options.configs[0], overrides)
    if unknown := [plan for plan in options.plans if plan not in known]:
        parser.error(f"--plans: got {unknown[0]!r}, expected some of {', '.join(known)}")
    if options.tables and options.configs:
        parser.error(f"--tables: got CONFIG {options.configs[0]!r} too, expected none")
    if not options.tables and not options.configs:
        parser.error(
            "CONFIG: got nothing, expected a TOML file such as train_configs/debug_cola.toml"
        )
    for config in options.configs:
        parser.check_toml(config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
