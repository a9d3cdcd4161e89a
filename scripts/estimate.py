#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run will need and send, before it starts and without its devices.

    python scripts/estimate.py train_configs/boost_30b.toml --world 1024
    python scripts/estimate.py CONFIG --hardware h200 --json [--section.key=value ...]

Prints parameters, FLOPs a token, memory of the largest rank by part, bytes a rank exchanges in a
step by mesh dimension and operation, and a modelled step time, for the configuration as it is and,
on the same ranks with the same batches, for full rank, vanilla tensor parallelism and BTP. Weights,
gradients, optimizer state and bytes are exact; activations are counted by running a block on
tensors without data; the step time is a model, see torchtitan_lr/analysis/step_time.py.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_lr.analysis.activations import (
    Split,
    kept_bytes,
    layer_recompute_flops,
    recompute_flops,
)
from torchtitan_lr.analysis.communication import Traffic, model_traffic
from torchtitan_lr.analysis.data_parallel import DataParallel, data_parallel_traffic
from torchtitan_lr.analysis.flops import flops_per_token
from torchtitan_lr.analysis.memory import Precision, static_memory
from torchtitan_lr.analysis.parameters import count_parameters
from torchtitan_lr.analysis.rehearsal import saved_bytes
from torchtitan_lr.analysis.step_time import Hardware, MeshDim, model_step_time
from torchtitan_lr.cli import OneLineParser
from torchtitan_lr.config_checks import build_job_config, check_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.data_parallel import reshard_after_forward
from torchtitan_lr.parallel.tensor_parallel import TPSettings, settings_for

HARDWARE = Path(__file__).parent / "hardware"


@dataclass(frozen=True)
class Plan:
    """A model and how tensor parallelism splits it."""

    args: LlamaArgs
    settings: TPSettings


def main(argv: list[str] | None = None) -> int:
    """Print the estimate; returns the exit status."""
    options, overrides = _parse(argv)
    try:
        hardware = load_hardware(options.hardware)
        config = build_job_config([f"--job.config_file={options.config}", *overrides])
        world = options.world or default_world(config)
        check_job_config(config, world, "cuda")
        report = estimate(config, world, hardware)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="a TOML file of ./run_llama_train.sh")
    parser.add_argument("--world", type=int, default=0, help="ranks; by default the least it needs")
    parser.add_argument("--hardware", default="h100", help="a file of scripts/hardware, or a path")
    parser.add_argument("--json", action="store_true")
    options, overrides = parser.parse_known_args(argv)
    if options.world < 0:
        parser.error("--world must be at least 1")
    return options, overrides


def load_hardware(name: str) -> Hardware:
    """Read a hardware file.

    Args:
        name: A path, or the name of a file in ``scripts/hardware``.

    Raises:
        ConfigError: It does not exist or does not hold exactly the fields of `Hardware`.
    """
    path = Path(name) if name.endswith(".toml") else HARDWARE / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in HARDWARE.glob("*.toml")))
        raise ConfigError("--hardware", name, f"a TOML file, or one of {known}")
    try:
        values = tomli.loads(path.read_text())
    except tomli.TOMLDecodeError as error:
        raise ConfigError("--hardware", name, f"a TOML file ({error})") from error
    wanted = {field.name: field.type for field in fields(Hardware)}
    for key in wanted.keys() ^ values.keys():
        raise ConfigError(f"{path.name}: {key}", values.get(key), f"exactly {', '.join(wanted)}")
    for key, kind in wanted.items():
        number = isinstance(values[key], int | float) and values[key] > 0
        if not (isinstance(values[key], str) if kind is str else number):
            raise ConfigError(f"{path.name}: {key}", values[key], "a positive number")
    return Hardware(**values)


def default_world(config: Any) -> int:
    """Return the product of the degrees, with one rank for ``data_parallel_shard_degree = -1``."""
    section = config.parallelism
    return int(
        section.tensor_parallel_degree
        * section.pipeline_parallel_degree
        * section.data_parallel_replicate_degree
        * max(1, section.data_parallel_shard_degree)
    )


def estimate(config: Any, world: int, hardware: Hardware) -> dict[str, Any]:
    """Estimate a checked configuration, and its alternatives on the same ranks.

    Args:
        config: As `build_job_config` returns it.
        world: Ranks.
        hardware: The machine.
    """
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_lr.specs  # noqa: F401

    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    assert isinstance(args, LlamaArgs)
    args = replace(args)
    args.update_from_config(config)
    degree = config.parallelism.tensor_parallel_degree
    plan = Plan(args, settings_for(config, args, degree))
    report = _estimate_plan(config, world, hardware, plan)
    others = _alternatives(plan)
    alternatives = {
        name: _estimate_plan(config, world, hardware, other) for name, other in others.items()
    }
    return {"world": world, "hardware": hardware.name, **report, "alternatives": alternatives}


def _alternatives(plan: Plan) -> dict[str, Plan]:
    """Return full rank, and for a low-rank model the fair vanilla plan and BTP."""
    args = plan.args
    dense = replace(args, family="full", rank_attention=0, rank_ffn=0, activation="fullrank")
    others = {"full": Plan(dense, TPSettings("megatron"))}
    if args.low_rank:
        others["vanilla"] = Plan(args, TPSettings("vanilla"))
        others["btp"] = Plan(args, TPSettings("btp"))
    return others


def _estimate_plan(config: Any, world: int, hardware: Hardware, plan: Plan) -> dict[str, Any]:
    dims = _degrees(config, world)
    args, training = plan.args, config.training
    batch, seq_len = training.local_batch_size, training.seq_len
    precision = Precision(
        *(
            TORCH_DTYPE_MAP[name].itemsize
            for name in (
                training.dtype,
                training.mixed_precision_param,
                training.mixed_precision_reduce,
            )
        )
    )
    global_batch = training.global_batch_size
    data = dims["dp_replicate"].size * dims["fsdp"].size
    accumulation = 1 if global_batch == -1 else global_batch // (batch * data)
    traffic = _traffic(config, plan, dims, accumulation)
    sizes = {
        "activation": precision.compute,
        "parameter": precision.compute,
        "gradient": precision.reduce,
        "statistic": 4,
        "loss": 4,
    }
    memory = _memory(config, plan, dims, precision)
    tokens = accumulation * batch * seq_len
    shares = dims["tp"].size
    flops = flops_per_token(args, seq_len) * tokens / shares
    flops += _recomputed(config, args, shares) * accumulation * batch
    step = model_step_time(flops, traffic, sizes, dims, hardware)
    return {
        "parameters": count_parameters(args).total,
        "flops_per_token": flops_per_token(args, seq_len),
        "memory_bytes": memory,
        "comm_bytes": _by_dim(traffic, sizes),
        "step_time": asdict(step)
        | {"total": step.total, "tokens_per_s": tokens * data / step.total},
    }


def _degrees(config: Any, world: int) -> dict[str, MeshDim]:
    """Sizes and strides of the mesh, innermost first as torchtitan lays it out."""
    section = config.parallelism
    tp, replicate = section.tensor_parallel_degree, section.data_parallel_replicate_degree
    shard = world // tp // replicate
    return {
        "tp": MeshDim(tp, 1),
        "fsdp": MeshDim(shard, tp),
        "dp_replicate": MeshDim(replicate, tp * shard),
    }


def _traffic(config: Any, plan: Plan, dims: dict[str, MeshDim], accumulation: int) -> list[Traffic]:
    degree, training = dims["tp"].size, config.training
    tensor = [
        replace(row, calls=accumulation * row.calls, elements=accumulation * row.elements)
        for row in model_traffic(
            plan.args, plan.settings, degree, training.local_batch_size * training.seq_len
        )
    ]
    layout = DataParallel(
        dims["dp_replicate"].size,
        dims["fsdp"].size,
        reshard_after_forward(config, pp_enabled=False),
        config.parallelism.fsdp_reshard_after_forward == "always",
        accumulation,
    )
    return tensor + data_parallel_traffic(plan.args, plan.settings, degree, layout)


def _memory(
    config: Any, plan: Plan, dims: dict[str, MeshDim], precision: Precision
) -> dict[str, int]:
    args, degree, training = plan.args, dims["tp"].size, config.training
    rotary = training.seq_len * args.head_dim // 2 * 8
    static = static_memory(args, plan.settings, degree, dims["fsdp"].size, precision, rotary)
    parts = asdict(static) | {"activations": _activations(config, plan, degree, precision)}
    return parts | {"total": sum(parts.values())}


def _activations(config: Any, plan: Plan, degree: int, precision: Precision) -> int:
    """Bytes kept for backward, with one block's recomputation on top where blocks recompute."""
    args, section, training = plan.args, config.activation_checkpoint, config.training
    batch, seq_len = training.local_batch_size, training.seq_len
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    rehearse = partial(saved_bytes, args, plan.settings, degree, batch, seq_len, dtype)
    plain = rehearse()
    mode = section.mode if args.low_rank or section.mode != "low_rank" else "full"
    if mode == "low_rank":
        kept = kept_bytes(
            args,
            batch * seq_len,
            args.n_heads,
            precision.compute,
            section.low_rank_save_attention,
            Split(degree, plan.settings),
        )
    elif mode == "full":
        kept = batch * seq_len * args.dim * precision.compute
        kept //= degree if plan.settings.plan == "btp" or plan.settings.comm == "sequence" else 1
    elif mode in ("none",):
        return args.n_layers * plain.block + plain.ends
    else:
        want = "'none', 'low_rank' or 'full': only these are estimated"
        raise ConfigError("activation_checkpoint.mode", mode, want)
    return args.n_layers * kept + plain.block + plain.ends


def _recomputed(config: Any, args: LlamaArgs, degree: int) -> int:
    """FLOPs that checkpointing repeats, for one sequence on one rank."""
    section, seq_len = config.activation_checkpoint, config.training.seq_len
    if section.mode == "low_rank" and args.low_rank:
        kept = section.low_rank_save_attention
        return args.n_layers * recompute_flops(args, seq_len, kept, degree)
    if section.mode in ("full", "low_rank"):
        return args.n_layers * layer_recompute_flops(args, seq_len, degree)
    return 0


def _by_dim(traffic: list[Traffic], sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for row in traffic:
        ops = result.setdefault(row.mesh_dim, {})
        ops[row.op] = ops.get(row.op, 0) + row.elements * sizes[row.role]
    return result


def as_text(report: dict[str, Any]) -> str:
    """Lay the report out as a table with a column a plan."""
    columns = {"as configured": report, **report["alternatives"]}
    gib, gflop, million = 2**30, 1e9, 1e6
    rows: list[tuple[str, list[str]]] = [
        ("parameters (M)", [f"{c['parameters'] / million:,.1f}" for c in columns.values()]),
        ("GFLOP a token", [f"{c['flops_per_token'] / gflop:,.2f}" for c in columns.values()]),
    ]
    for part in report["memory_bytes"]:
        cells = [f"{c['memory_bytes'][part] / gib:,.2f}" for c in columns.values()]
        rows.append((f"{part} (GiB)", cells))
    dims = sorted(
        {(d, op) for c in columns.values() for d, ops in c["comm_bytes"].items() for op in ops}
    )
    for dim, op in dims:
        cells = [f"{c['comm_bytes'].get(dim, {}).get(op, 0) / gib:,.3f}" for c in columns.values()]
        rows.append((f"{dim} {op} (GiB a step)", cells))
    for part in ("compute", "exposed_communication", "hidden_communication", "bubble", "total"):
        cells = [f"{c['step_time'][part]:,.3f}" for c in columns.values()]
        rows.append((f"{part} (s, modelled)", cells))
    rows.append(
        (
            "tokens/s (modelled)",
            [f"{c['step_time']['tokens_per_s']:,.0f}" for c in columns.values()],
        )
    )
    head = f"{report['world']} ranks, {report['hardware']}"
    lines = [f"{head:40}" + "".join(f"{name:>16}" for name in columns)]
    return "\n".join(
        [*lines, *(f"{name:40}" + "".join(f"{c:>16}" for c in cells) for name, cells in rows)]
    )


if __name__ == "__main__":
    sys.exit(main())
