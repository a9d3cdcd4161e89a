#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plan a run on 1,024 GPUs on paper: degrees, bytes per link, and time lost to failures.

    python scripts/papers/scale_out.py             # the tables of docs/scale_out.md
    python scripts/papers/scale_out.py --hardware h100_100gbit --storage 50

The first table estimates layouts of train_configs/boost_13b.toml as scripts/estimate.py does. Bytes
are what a GPU passes to its collectives per step, over links within a node and between nodes. The
second table gives the share of time that checkpoints and failures take, by the interval between
checkpoints, with Daly's formula for exponential failures. A checkpoint holds the weights and the
optimizer state once; its ranks write it to shared storage at --storage GB/s in all. "blocking"
stops training for that time, "async" only for the copy to the host, at --host GB/s per GPU; both
for --pause more (planning, barriers).

Exit status: 0, or 2 for invalid arguments.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.tools.cli import OneLineParser, in_one_line, markdown_table

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
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.estimate.run import read_run
    from torchtitan_lr.formulas.memory import static_memory
    from torchtitan_lr.tools.estimate_report import estimate

    arguments = [f"--job.config_file={config_file}", *COMMON, *LAYOUTS[name]]
    config = build_job_config(arguments)
    check_job_config(config, world, "cuda", on_paper=True)
    run = read_run(config, world)
    report = estimate(run, hardware, plans=())
    comm = averaged_bytes(report)
    inside = across = 0
    for dim, operations in comm.items():
        mesh = run.mesh[dim]
        if mesh.size * mesh.stride <= hardware.devices_per_node:
            inside += sum(operations.values())
        else:
            across += sum(operations.values())
    parts = report["memory_bytes"]
    # Each tensor-parallel rank's part, without FSDP's division and its copies.
    state = static_memory(
        [{n: s for unit in stage.values() for n, s in unit.items()} for stage in run.stages],
        1,
        run.precision,
        None if run.tsr is None else run.tsr_plans,
    )
    return Plan(
        name,
        inside,
        across,
        report["step_time"]["total"],
        report["step_time"]["tokens_per_s"],
        parts["peak"],
        (state.weights + state.optimizer) * config.parallelism.tensor_parallel_degree,
        parts["weights"] + parts["optimizer"],
    )


def averaged_bytes(report: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return a report's bytes by mesh dimension and operation, of an average step.

    With TSR-Adam the report's own are of a step without a refresh.
    """
    comm = {dim: dict(operations) for dim, operations in report["comm_bytes"].items()}
    if "tsr_comm_bytes" not in report:
        return comm
    for sign, kind in ((-1, "ordinary"), (1, "average")):
        for dim, operations in report["tsr_comm_bytes"][kind].items():
            for operation, size in operations.items():
                found = comm.setdefault(dim, {})
                found[operation] = found.get(operation, 0) + sign * size
    return comm


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
        cases = {"blocking": (write + least, 0.0), "async": (plan.rank_bytes / host + least, write)}
        for saving, (pause, late) in cases.items():

            def lost(interval: float, pause: float = pause, late: float = late) -> str:
                return f"{100 * lost_share(interval, pause, restart + late, mean):.1f} %"

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
    from torchtitan_lr.estimate.hardware import load_hardware
    from torchtitan_lr.formulas.faults import mean_time_to_failure

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
