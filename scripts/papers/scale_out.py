#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plan a run on 1,024 GPUs on paper: degrees, bytes per link, and time lost to failures.

    python scripts/papers/scale_out.py             # the tables of docs/scale_out.md
    python scripts/papers/scale_out.py --hardware h100_100gbit --storage 50

The first table estimates layouts of train_configs/boost_13b.toml as scripts/estimate.py does. Bytes
are what a GPU passes to its collectives per step, over links within a node and between nodes. The
second table gives the share of time that checkpoints and failures take, by the interval between
checkpoints, with Daly's formula for exponential failures. A checkpoint holds the weights and the
optimizer state once, and with TAGC every rank's residuals. The ranks write it to shared storage at
--storage GB/s in all. "blocking" stops training for that time, "async" only for what the copy to
the host, at --host GB/s per GPU, takes longer than a step; both for --pause more (planning). "-":
the next save would come before the last one is written.

Exit status: 0, or 2 for invalid arguments.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import markdown_table

if TYPE_CHECKING:
    from torchtitan_lr.estimate.rehearsal import Rehearsal
    from torchtitan_lr.estimate.run import Run
    from torchtitan_lr.formulas.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = ROOT / "scripts" / "hardware"

_TP = "--parallelism.tensor_parallel_degree"
_SHARD = "--parallelism.data_parallel_shard_degree"
_REPLICAS = "--parallelism.data_parallel_replicate_degree"
COMMON = (
    *("--parallelism.pipeline_parallel_degree=1", f"{_TP}=8"),
    *("--training.local_batch_size=4", "--training.global_batch_size=-1"),
)
_FLAT = (f"{_SHARD}=-1", f"{_REPLICAS}=1")
_COPIES = (f"{_SHARD}=1", f"{_REPLICAS}=128")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "vanilla TP 8, FSDP 128": (*_FLAT, "--parallelism.tp_plan=vanilla_replicated"),
    "BTP 8, FSDP 128": _FLAT,
    "BTP 8, 128 replicas": _COPIES,
    "BTP 8, 128 replicas, TSR-Adam": (*_COPIES, "--optimizer.name=TSRAdam", "--optimizer.lr=1e-2"),
    "BTP 8, FSDP 128, TAGC 10×": (
        *(*_FLAT, "--grad_compression.codec=sketch", "--grad_compression.level=10x"),
        "--grad_compression.auto",
    ),
}
"""Arguments of each layout, beyond `COMMON`; 128 micro-batches of 4 sequences per step in all."""

INTERVALS = (1, 3, 10, 30, 100)
"""Minutes between checkpoints, beside Daly's best."""


@dataclass(frozen=True)
class Plan:
    """An estimated layout.

    Args:
        name: Its name.
        inside: Bytes per GPU and step over links within a node.
        across: Bytes per GPU and step over links between nodes.
        seconds: Modelled seconds per step.
        tokens_per_s: Of all GPUs.
        memory: Bytes of the GPU that needs most.
        checkpoint: Bytes of a checkpoint.
        rank_bytes: Bytes of it that a GPU holds, the most that it copies to its host.
    """

    name: str
    inside: int
    across: int
    seconds: float
    tokens_per_s: float
    memory: int
    checkpoint: int
    rank_bytes: int


def plan_layout(name: str, config_file: str, world: int, hardware: Any) -> Plan:
    """Estimate a layout.

    Args:
        name: Key of `LAYOUTS`.
        config_file: The TOML file of the model.
        world: Number of GPUs.
        hardware: Result of `load_hardware`.

    Raises:
        ConfigError: The layout does not fit the model or the GPUs.
    """
    from torchtitan_lr.estimate.memory import rank_memory, rehearse_run
    from torchtitan_lr.estimate.timing import step_time
    from torchtitan_lr.estimate.work import work_of_run

    run = run_of(name, config_file, world)
    rehearsal = rehearse_run(run)
    rows = average_rows(run, rehearsal)
    inside, across = bytes_by_link(run, rows, hardware.devices_per_node)
    seconds = step_time(run, [rows], hardware, work_of_run(run)).total
    parts = rank_memory(run, 0, rehearsal)
    checkpoint, rank_bytes = checkpoint_bytes(run)
    sequences = run.microbatch * run.accumulation * run.shard * run.replicas
    return Plan(
        name,
        inside,
        across,
        seconds,
        sequences * run.seq_len / seconds,
        parts["peak"],
        checkpoint,
        rank_bytes,
    )


def run_of(name: str, config_file: str, world: int) -> "Run":
    """Return the run of a layout; arguments and errors as for `plan_layout`."""
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.estimate.run import read_run

    arguments = [f"--job.config_file={config_file}", *COMMON, *LAYOUTS[name]]
    config = build_job_config(arguments)
    check_job_config(config, world, "cuda", on_paper=True)
    return read_run(config, world)


def average_rows(run: "Run", rehearsal: "Rehearsal | None" = None) -> "list[Traffic]":
    """Return the collectives of an average step: with TSR-Adam some steps refresh.

    Args:
        run: The run.
        rehearsal: Of its blocks, where recomputation repeats collectives.
    """
    from torchtitan_lr.estimate.traffic import average_optimizer_traffic, step_traffic

    rows = step_traffic(run, 0, rehearsal)
    if run.tsr is None:
        return rows
    return [row for row in rows if row.scope != "step"] + average_optimizer_traffic(run, 0)


def bytes_by_link(run: "Run", rows: "Sequence[Traffic]", per_node: int) -> tuple[int, int]:
    """Return the bytes of collectives whose ranks share a node, and of those that span nodes.

    Args:
        run: The run.
        rows: Result of `average_rows`.
        per_node: GPUs of a node.
    """
    from torchtitan_lr.estimate.traffic import bytes_by_dim

    inside = across = 0
    for dim, operations in bytes_by_dim(rows, run.wire_dtypes).items():
        mesh = run.mesh[dim]
        if mesh.size * mesh.stride <= per_node:
            inside += sum(operations.values())
        else:
            across += sum(operations.values())
    return inside, across


def checkpoint_bytes(run: "Run") -> tuple[int, int]:
    """Return the bytes of a checkpoint, and of what a rank holds of it.

    Weights and optimizer state are there once, in the parts of the tensor-parallel ranks. Every
    rank has residuals of its own (TAGC).

    Args:
        run: The run, without a pipeline.
    """
    from torchtitan_lr.compression.settings import compression_settings
    from torchtitan_lr.estimate.traffic import exchanged_units
    from torchtitan_lr.formulas.compression import leaves_residual
    from torchtitan_lr.formulas.memory import static_memory

    parameters = [{n: s for unit in run.stages[0].values() for n, s in unit.items()}]
    plans = None if run.tsr is None else run.tsr_plans
    # Without FSDP's division and its copies; then of the first FSDP rank.
    whole, part = (static_memory(parameters, n, run.precision, plans) for n in (1, run.shard))
    degree = run.config.parallelism.tensor_parallel_degree
    owed = 0
    if run.config.grad_compression.codec != "none":
        settings = compression_settings(run.config, max(run.shard, run.replicas))
        owing = [unit for _, unit, codec in exchanged_units(run) if leaves_residual(codec)]
        entries = sum(unit.ranks * unit.compressed for unit in owing)
        owed = settings.residual_dtype.itemsize * entries
    state = degree * (whole.weights + whole.optimizer)
    return state + owed * run.world, part.weights + part.optimizer + owed


def layout_table(plans: Sequence[Plan]) -> str:
    """Return the table of degrees, bytes and modelled times."""
    header = ["layout", "in a node", "between nodes", "step", "tokens/s", "memory", "checkpoint"]
    rows = [
        [
            plan.name,
            f"{plan.inside / 1e9:.2f} GB",
            f"{plan.across / 1e9:.2f} GB",
            f"{plan.seconds:.2f} s",
            f"{plan.tokens_per_s / 1e6:.2f} M",
            f"{plan.memory / 2**30:.1f} GiB",
            f"{plan.checkpoint / 1e9:.0f} GB",
        ]
        for plan in plans
    ]
    return markdown_table(header, rows)


def loss_table(
    plans: Sequence[Plan], mean: float, storage: float, host: float, restart: float, least: float
) -> str:
    """Return the table of time lost by the interval between checkpoints.

    Args:
        plans: The layouts.
        mean: Mean seconds between failures.
        storage: Bytes per second into shared storage, of all ranks together.
        host: Bytes per second of a GPU into its host's memory.
        restart: Seconds from a failure to the first new step.
        least: Seconds of every save beside its bytes.
    """
    from torchtitan_lr.formulas.faults import daly_interval, lost_share, young_interval

    header = ["layout", "saving", "pause", *(f"{m} min" for m in INTERVALS)]
    header += ["Young", "Daly", "lost there"]
    rows = []
    for plan in plans:
        write = plan.checkpoint / storage
        # An asynchronous checkpoint is complete only when it is written: until then a failure
        # goes back to the one before, which is as if the restart took longer.
        left = max(plan.rank_bytes / host - plan.seconds, 0.0)  # the copy runs beside the next step
        cases = {"blocking": (write + least, 0.0), "async": (left + least, write)}
        for saving, (pause, late) in cases.items():

            def lost(interval: float, pause: float = pause, late: float = late) -> str:
                share = lost_share(interval, pause, restart + late, mean)
                return f"{100 * share:.1f} %" if interval >= late else "-"

            # One asynchronous save must be written before the next begins.
            best = max(daly_interval(pause, mean), late)
            cells = [lost(60.0 * minutes) for minutes in INTERVALS]
            young = young_interval(pause, mean)
            intervals = [f"{seconds / 60:.1f} min" for seconds in (young, best)]
            rows.append([plan.name, saving, f"{pause:.2f} s", *cells, *intervals, lost(best)])
    return markdown_table(header, rows)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    parser = OneLineParser(description=__doc__)
    config = str(ROOT / "train_configs/boost_13b.toml")
    parser.add_first("config", "--config", default=config, help="the TOML file of the model")
    parser.add_argument("--world", type=int, default=1024, help="GPUs")
    parser.add_argument("--hardware", default="h100_400gbit", help="a file of scripts/hardware")
    parser.add_argument("--hours", type=float, default=3, help="hours per failure in 1,000 GPUs")
    parser.add_argument("--storage", type=float, default=10, help="GB/s into shared storage")
    parser.add_argument("--host", type=float, default=20, help="GB/s of a GPU into its host")
    parser.add_argument("--restart", type=float, default=300, help="seconds of a restart")
    parser.add_argument("--pause", type=float, default=1, help="seconds of a save beside its bytes")
    options = parser.parse_args(argv)
    parser.check_at_least(options, world=8, restart=0, pause=0)
    for name in ("hours", "storage", "host"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name}: got {getattr(options, name)}, expected a positive number")
    parser.check_toml(options.config, "CONFIG")
    from torchtitan_lr.formulas.faults import mean_time_to_failure

    from torchtitan_lr.estimate.hardware import load_hardware

    hardware = load_hardware(options.hardware, HARDWARE)
    plans = [plan_layout(name, options.config, options.world, hardware) for name in LAYOUTS]
    mean = mean_time_to_failure(options.world, 1000, 3600 * options.hours)
    print(f"{options.world:,} GPUs, {hardware.name}; a failure every {mean / 3600:.2f} hours\n")
    print(layout_table(plans), end="\n\n")
    rates = (1e9 * options.storage, 1e9 * options.host)
    print(loss_table(plans, mean, *rates, options.restart, options.pause))
    return 0


if __name__ == "__main__":
    sys.exit(main())
