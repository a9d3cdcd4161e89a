# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimates of runs that are compared, as a dictionary and as a text table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torchtitan_lr.training.register  # noqa: F401  (registers our models)
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.costs.described_run import Run, read_run, with_wire
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.memory import (
    checkpoint_bytes,
    in_flight,
    rank_memory,
    with_kept_inputs,
)
from torchtitan_lr.costs.rehearsal import rehearse_run
from torchtitan_lr.costs.step_time import communication_seconds, step_time
from torchtitan_lr.costs.step_traffic import (
    WIRES,
    averaged,
    bytes_by_dim,
    gradient_bytes,
    step_traffic,
)
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.launch.placement import fit
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, resolve_settings

FULL_RANK = "full"  # the alternative that is a family; ``auto`` selects its plan
GIB = 2**30


def read_runs(
    configs: Mapping[str, str],  # TOML files by the names of their columns
    world: int | None,  # ranks, by default the least that a configuration needs
    plans: str,  # of one configuration, beside which it stands
    overrides: Sequence[str],
) -> dict[str, Run | ConfigError]:
    """Read the runs to compare, fitted to their ranks as in training, and check them."""
    runs: dict[str, Run | ConfigError] = {}
    for name, path in configs.items():
        runs[name] = first = read_first(path, world, overrides)
    if len(runs) > 1:
        return runs
    names, known = plans.split(","), [FULL_RANK, *PLANS]
    for plan in names:
        require(plan in known, "--plans", plan, one_of(known, plan))
    return {"as configured": first, **dict(alternatives(first, names))}


def read_first(path: str, world: int | None, overrides: Sequence[str]) -> Run:
    """Read and check one run, see `read_runs`."""
    arguments = [f"--job.config_file={path}", *overrides]
    config = build_job_config(arguments)
    ranks = least_ranks(vars(config.parallelism)) if world is None else world
    if fitted := fit(config, arguments, ranks):
        config = build_job_config([*arguments, *fitted])
    check_job_config(config, ranks, "cuda", on_paper=True)
    return read_run(config, ranks)


def alternatives(run: Run, plans: Sequence[str]) -> Iterator[tuple[str, Run | ConfigError]]:
    """Yield the run's model under plans, on the same ranks with the same batches and AdamW.

    Or there is the reason why a plan cannot have it. All have one mode of checkpointing: the run's,
    or ``full`` for ``low_rank`` beside full rank, which has no latents to keep. With context
    parallelism all gather keys and values. A full-rank model is compared with its flavor's CoLA
    model.
    """
    config, low = run.config, _low_rank(run)
    config = replace(config, parallelism=replace(config.parallelism, cp_gather="kv"))
    if FULL_RANK in plans and run.checkpointing == "low_rank":
        section = replace(config.activation_checkpoint, mode="full")
        config = replace(config, activation_checkpoint=section)
        check_job_config(config, run.world, "cuda", on_paper=True)
    dense = replace(low, family="full", rank_attention=0, rank_ffn=0, activation="fullrank")
    for name in plans:
        if name != FULL_RANK and not low.low_rank:
            continue
        plan, args = ("auto", dense) if name == FULL_RANK else (name, low)
        try:
            settings = resolve_settings(TPSettings(plan), args, run.tp, run.seq_len)
        except ConfigError as error:
            yield name, error
        else:
            yield name, Run(config, run.world, args, settings, baseline=True)


def _low_rank(run: Run) -> LlamaArgs:
    """Return the run's low-rank model without lanes, which these plans do not have."""
    args = replace(run.args, lanes=1, sync_fraction=1.0)
    cola, flavor = FLAVORS["cola"], run.config.model.flavor
    if args.low_rank or flavor not in tuple(cola):  # the file of a shape belongs to one family
        return args
    return replace(cola[flavor], max_seq_len=run.args.max_seq_len)


def estimate(runs: Mapping[str, Run | ConfigError], hardware: Hardware) -> dict[str, Any]:
    """Estimate runs that are compared: the first is that of the report, others are alternatives.

    Memory is of the rank that needs most, bytes of the pipeline rank that sends most, checkpoints
    and tokens/s of all ranks. Where an optimizer's steps differ, ``comm_bytes`` are those of an
    ordinary one, ``gradient_bytes`` and the time of an average one.
    """
    (name, first), *others = runs.items()
    assert isinstance(first, Run)
    columns: dict[str, Any] = {}
    report = _column(first, hardware)
    for other, run in others:
        if isinstance(run, ConfigError):
            columns[other] = {"refused": str(run)}
        else:
            columns[other] = _column(run, hardware)
    return {"name": name, "hardware": hardware.name, **report, "alternatives": columns}


def _column(run: Run, hardware: Hardware) -> dict[str, Any]:
    run = with_kept_inputs(run, hardware.memory_gib * GIB)
    rehearsal = rehearse_run(run)
    ranks: list[dict[str, Any]] = []
    traffic = []
    for pp_rank in range(run.pp):
        rows = step_traffic(run, pp_rank, rehearsal)
        traffic.append(averaged(run, pp_rank, rows))
        ranks.append(
            {
                "rank": pp_rank,
                "stages": run.stages_of(pp_rank),
                "units": list(run.units_of(pp_rank)),
                "microbatches_in_flight": in_flight(run, pp_rank, rehearsal)[1],
                "memory_bytes": rank_memory(run, pp_rank, rehearsal),
                "comm_bytes": bytes_by_dim(rows, run.wire_dtypes),
            }
        )
    heaviest = max(ranks, key=lambda rank: int(rank["memory_bytes"]["peak"]))
    busiest = max(ranks, key=lambda rank: _total(rank["comm_bytes"]))
    time = step_time(run, traffic, hardware, rehearsal)
    tokens_per_s = run.tokens_per_step / time.total
    parameters, flops = run.args.get_nparams_and_flops(empty_model(run.args), run.seq_len)
    report = {
        "world": run.world,
        "checkpointing": run.checkpointing,
        "keeps_inputs": run.keeps_inputs,
        "parameters": parameters,
        "flops_per_token": flops,
        "memory_bytes": heaviest["memory_bytes"],
        "comm_bytes": busiest["comm_bytes"],
        "gradient_bytes": gradient_bytes(run, busiest["rank"]),
        "checkpoint_bytes": checkpoint_bytes(run),
        "step_time": asdict(time) | {"total": time.total, "tokens_per_s": tokens_per_s},
    }
    kinds: dict[str, dict[str, int]] = {}
    seconds: dict[str, float] = {}
    of_steps = run.optimizer.kinds_of_steps(busiest["rank"])
    for kind, rows in (of_steps | run.outer.kinds_of_steps(busiest["rank"])).items():
        by_wire = {wire: bytes_by_dim(rows, with_wire(run, wire).wire_dtypes) for wire in WIRES}
        kinds[kind] = {wire: _total(sent) for wire, sent in by_wire.items()}
        took = communication_seconds(rows, run.wire_dtypes, run.mesh, hardware)
        seconds[kind] = sum(took.values())
    if kinds:
        what = {"name": run.entry.name, "bytes": kinds, "seconds": seconds}
        report["kinds_of_steps"] = what
    if run.entry.cost is None:
        report["own_optimizer"] = run.entry.name
    if run.pp > 1:
        report["pipeline_ranks"] = ranks
    return report


def _total(comm_bytes: Mapping[str, Mapping[str, int]]) -> int:
    return sum(size for ops in comm_bytes.values() for size in ops.values())


def as_text(report: dict[str, Any], hardware: Hardware) -> str:
    """Format the report as a table with one column per run, and what is the first run's alone."""
    refused = {n: c["refused"] for n, c in report["alternatives"].items() if "refused" in c}
    columns = {report["name"]: report}
    columns |= {n: c for n, c in report["alternatives"].items() if n not in refused}
    rows = [[name, *cells] for name, cells in _rows([*columns.values()])]
    lines = [text_table([report["hardware"], *columns], rows), ""]
    for rank in report.get("pipeline_ranks", []):
        ends = [name for name in rank["units"] if not name.startswith("block")]
        parts = [f"stages {rank['stages']}", f"{len(rank['units']) - len(ends)} blocks", *ends]
        lines.append(
            f"pipeline rank {rank['rank']}: {', '.join(parts)}; {rank['microbatches_in_flight']} "
            f"micro-batches in flight, {rank['memory_bytes']['peak'] / GIB:,.2f} GiB, "
            f"{_total(rank['comm_bytes']) / GIB:,.3f} GiB sent"
        )
    kinds = report.get("kinds_of_steps", {"bytes": {}})
    for kind, by_wire in kinds["bytes"].items():
        sizes = [f"{size / GIB:,.3f} in {wire}" for wire, size in by_wire.items()]
        took = f"{kinds['seconds'][kind]:.4g} s (modelled)"
        lines.append(f"{kinds['name']}, {kind} step (GiB): {', '.join(sizes)}; {took}")
    lines += [f"{name}: {reason}" for name, reason in refused.items()]
    for name, column in columns.items():
        if own := column.get("own_optimizer"):
            lines.append(f"{name}: {own} counts as AdamW does, without what it sends itself")
        if column["memory_bytes"]["peak"] > hardware.memory_gib * GIB:
            lines.append(f"{name}: does not fit into {hardware.memory_gib:g} GiB")
    return "\n".join(lines)


def _rows(columns: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    yield "ranks", [f"{c['world']:,}" for c in columns]
    kept = [c["checkpointing"] + ", inputs kept" * c["keeps_inputs"] for c in columns]
    yield "activation checkpointing", kept
    yield "parameters (M)", [f"{c['parameters'] / 1e6:,.1f}" for c in columns]
    yield "GFLOP per token", [f"{c['flops_per_token'] / 1e9:,.3f}" for c in columns]
    for part in columns[0]["memory_bytes"]:
        yield f"{part} (GiB per rank)", [_number(c["memory_bytes"][part] / GIB) for c in columns]
    sent: set[tuple[str, str]] = set()
    for column in columns:
        for dim, sizes_by_op in column["comm_bytes"].items():
            sent.update((dim, op) for op in sizes_by_op)
    for dim, op in sorted(sent):
        sizes = [c["comm_bytes"].get(dim, {}).get(op, 0) for c in columns]
        yield f"{dim} {op} (GiB per step)", [_number(size / GIB) for size in sizes]
    for wire in WIRES:
        sizes = [c["gradient_bytes"].get(wire) for c in columns]
        cells = ["-" if size is None else _number(size / GIB) for size in sizes]
        yield f"gradients, if in {wire} (GiB per step)", cells
    sizes = [sum(c["checkpoint_bytes"].values()) for c in columns]
    yield "checkpoint (GiB, all ranks)", [_number(size / GIB) for size in sizes]
    for part in columns[0]["step_time"]:
        speed = part == "tokens_per_s"
        name = "tokens/s (all ranks, modelled)" if speed else f"{part} (s, modelled)"
        yield name, [_number(c["step_time"][part]) for c in columns]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"
