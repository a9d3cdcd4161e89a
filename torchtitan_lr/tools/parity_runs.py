# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Short real runs of the trainer on ranks that exist, in several layouts, and how they differ."""

import gc
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.compat.names import clean_name
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families.registry import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.tools.rank_pool import RankPool
from torchtitan_lr.tools.seed_checkpoint import make_seed_checkpoint
from torchtitan_lr.training.history import read_history
from torchtitan_lr.training.trainer import Trainer

TINY = [
    "--model.flavor=parity",
    "--training.dataset=python_stdlib",
    "--training.seq_len=16",
    "--training.global_batch_size=8",
    "--training.steps=2",
    "--training.dtype=float32",
    "--training.mixed_precision_param=float32",
    "--optimizer.lr=1e-3",
    # Adam's first steps divide a gradient by its own size: with the default 1e-8 an entry that is
    # nothing but rounding noise moves its weight by a full learning rate, in a random direction.
    "--optimizer.eps=1e-5",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--validation.no_enable",
    "--checkpoint.no_enable",
]
"""Arguments of a run that takes about a second; a test adds its layout."""

EXACT = 1e-9
"""
Limit of `largest_difference` between two fp64 runs of the same training. Rounding in fp64 is
1.1e-16 per operation, and three steps made at most 2.2e-14 of it (measured on fourteen layouts).
Every deliberate fault of these tests gives more than 1e-3.
"""


def add_parity_flavors() -> None:
    """Add the flavors ``parity`` (2 layers) and ``parity4`` (4 layers, for deep pipelines).

    No two widths coincide, and every one divides by four.
    """
    for family in FAMILIES:
        low_rank = family != "full"
        for name, layers in (("parity", 2), ("parity4", 4)):
            FLAVORS[family]._flavors[name] = LlamaArgs(
                family=family,
                dim=64,
                n_layers=layers,
                n_heads=8,
                n_kv_heads=4,
                ffn_dim=88,
                vocab_size=4096,
                rank_attention=12 if low_rank else 0,
                rank_ffn=20 if low_rank else 0,
                activation="fullrank" if family in ("full", "svd") else "both",
            )


add_parity_flavors()


def degrees(tensor: int = 1, pipeline: int = 1, local_batch: int = 8) -> list[str]:
    """Return arguments for degrees; FSDP2 takes the ranks that are left.

    A pipeline gets at most four micro-batches, as many as the deepest one has stages.
    """
    arguments = [
        f"--parallelism.tensor_parallel_degree={tensor}",
        f"--parallelism.pipeline_parallel_degree={pipeline}",
        f"--training.local_batch_size={local_batch}",
    ]
    size = max(1, local_batch // 4) if pipeline > 1 else 1
    return [*arguments, f"--parallelism.pipeline_parallel_microbatch_size={size}"]


DEEP = ["--model.flavor=parity4"]
"""Enough layers for four stages."""

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp1": (1, degrees()),
    "tp2": (2, degrees(tensor=2)),
    "pp2": (2, degrees(pipeline=2)),
    "tp4": (4, degrees(tensor=4)),
    "pp4": (4, [*degrees(pipeline=4), *DEEP]),
    "pp2_tp2": (4, degrees(tensor=2, pipeline=2)),
    "fsdp2_tp2": (4, degrees(tensor=2, local_batch=4)),
    "fsdp2_pp2": (4, degrees(pipeline=2, local_batch=4)),
}
"""Number of ranks and arguments, by name; the global batch is always the same."""


def model(family: str) -> list[str]:
    """Return the argument that chooses a family."""
    return [f"--model.name=llama_{family}"]


def schedule(name: str) -> list[str]:
    """Return the arguments that choose a pipeline schedule, and a model of as many stages."""
    deep = DEEP if name in ("Interleaved1F1B", "ZBVZeroBubble") else []
    return [f"--parallelism.pipeline_parallel_schedule={name}", *deep]


def flavor(options: list[str]) -> list[str]:
    """Return the last flavor that options choose, for their reference."""
    return [option for option in options if option.startswith("--model.flavor=")][-1:]


def train(
    arguments: list[str],
    dump_folder: str = "",
    exact: bool = True,
    everywhere: bool = False,
    build: Callable[[Any], Trainer] = Trainer,
) -> dict[str, Any]:
    """Train on the calling process group; call it on every rank.

    Args:
        arguments: As on the command line; those of `TINY` come first.
        dump_folder: Where to write; a new folder by default.
        exact: Whether everything that is float32 in the configuration is computed in float64.
        everywhere: Whether every rank returns the parameters, and not rank 0 alone.
        build: Makes the trainer from its configuration.

    Returns:
        ``losses``, ``grad_norms`` (one per step), ``val_losses``, ``skipped_steps``, ``step``,
        ``dump_folder``, ``last_val_loss`` (as this rank knows it), ``state_dtypes`` (of the
        optimizer), ``ledger`` (this rank's rows of the last logged step) and ``parameters`` (full
        arrays by name).
    """
    logger.setLevel("ERROR")
    folders: list[Any] = [dump_folder or tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    config = build_job_config([*TINY, f"--job.dump_folder={folders[0]}", *arguments])
    check_job_config(config, dist.get_world_size(), "cpu")
    if exact:
        use_float64(config)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    trainer = None
    try:
        trainer = build(config)
        trainer.train()
        result = _result_of(trainer, everywhere) | {"dump_folder": folders[0]}
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if trainer is not None:
            trainer.close()
        del trainer
        torch.compiler.reset()  # compiled blocks of many models in one process hit its limit
        gc.collect()  # torchtitan switches the collector off, and a trainer is full of cycles
        gc.freeze()  # what is left are caches: the next run's collection need not walk them
    dist.barrier()
    return result | _curves_of(Path(folders[0]))


def _result_of(trainer: Trainer, everywhere: bool) -> dict[str, Any]:
    validated = trainer.job_config.validation.enable
    return {
        "step": trainer.step,
        "skipped_steps": trainer.skipped_steps,
        "ledger": trainer._ledger.rows() if trainer._ledger else [],
        "last_val_loss": trainer.validator.last_loss if validated else None,
        "state_dtypes": _state_dtypes(trainer.optimizers),
        "parameters": _full_parameters(trainer.model_parts, everywhere),
    }


def _curves_of(folder: Path) -> dict[str, list[Any]]:
    history = read_history(folder / "metrics.jsonl")
    keys = {
        "losses": "loss_metrics/global_avg_loss",
        "grad_norms": "grad_norm",
        "val_losses": "validation_metrics/loss",
    }
    return {
        name: [record[key] for record in history if key in record] for name, key in keys.items()
    }


def use_float64(config: Any) -> None:
    """Compute in float64 what the configuration computes in float32; leave a bf16 run as it is.

    torchtitan's table of dtypes has no float64, and our checks refuse what it does not have.
    """
    TORCH_DTYPE_MAP["float64"] = torch.float64
    keys = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
    if all(getattr(config.training, key) == "float32" for key in keys):
        for key in keys:
            setattr(config.training, key, "float64")


def largest_difference(run: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the largest max|a - b| / max|b| over losses, gradient norms and every parameter."""
    assert run["parameters"].keys() == reference["parameters"].keys()
    assert len(run["losses"]) == len(reference["losses"]) > 0
    pairs = [
        (np.array(run["losses"]), np.array(reference["losses"])),
        (np.array(run["grad_norms"]), np.array(reference["grad_norms"])),
        *((run["parameters"][name], value) for name, value in reference["parameters"].items()),
    ]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


BF16 = ["--training.mixed_precision_param=bfloat16"]

ROUNDING = 6.0
"""
Limit of `rounding_excess`. A layout in bf16 rounds other partial sums than one process does: 1.8
times its error at most after three steps, 3.5 after one, whose update is little but the signs of
the gradients (measured over the support matrix). A gradient averaged once too often gives 16, bf16
master weights give 39.
"""


def bf16_references(
    pool: RankPool, arguments: list[str], run: Callable[..., Any] = train
) -> list[dict[str, Any]]:
    """Train on one process: in float64, in float64 without moving, and with bf16 compute.

    Args:
        pool: Of one rank.
        arguments: As on the command line.
        run: `train`, or what stands for it.
    """
    still = ["--optimizer.lr=1e-30"]
    return [pool.run(run, [*arguments, *more])[0] for more in ([], still, BF16)]


def rounding_excess(run: dict[str, Any], references: list[dict[str, Any]]) -> float:
    """Compare the rounding error of a bf16 run with that of one process in bf16.

    The error of a parameter is ‖w - w_exact‖ / ‖w_exact - w_start‖, with float64 as exact.

    Args:
        run: What `train` returned.
        references: What `bf16_references` returned for the same training.

    Returns:
        The largest ratio of the two errors over all parameters. A small parameter's own error may
        be small by chance, so the median over parameters is the least that counts.
    """
    exact, start, alone = (reference["parameters"] for reference in references)

    def errors(parameters: dict[str, Any]) -> dict[str, float]:
        return {
            name: float(
                np.linalg.norm(parameters[name] - value) / np.linalg.norm(value - start[name])
            )
            for name, value in exact.items()
        }

    assert run["parameters"].keys() == exact.keys()
    usual = errors(alone)
    median = float(np.median(list(usual.values())))
    assert 1e-3 < median < 0.2, "the reference is no bf16 run"
    return max(
        error / max(usual[name], median) for name, error in errors(run["parameters"]).items()
    )


def _state_dtypes(optimizers: Any) -> set[str]:
    states = [s for o in optimizers.optimizers for s in o.state.values()]
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def _full_parameters(model_parts: list[Any], everywhere: bool) -> dict[str, Any]:
    """Gather whole parameters as arrays by name; on rank 0 alone unless ``everywhere``."""
    parts: dict[str, _Part] = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            parts[clean_name(name)] = _part_of(parameter)
    ranks: list[Any] = [None] * dist.get_world_size()
    if everywhere:
        dist.all_gather_object(ranks, parts)
    else:
        dist.gather_object(parts, ranks if dist.get_rank() == 0 else None)
    whole: dict[str, Any] = {}
    for name, (shape, offset, values) in (item for rank in ranks if rank for item in rank.items()):
        target = whole.setdefault(name, np.full(shape, np.nan))
        region = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        known = target[region]
        assert np.isnan(known).all() or np.array_equal(known, values, equal_nan=True), (
            f"ranks hold different values of {name}"
        )
        target[region] = values
    return dict(sorted(whole.items()))


_Part = tuple[tuple[int, ...], tuple[int, ...], Any]
"""A parameter's whole shape, where this rank's part begins, and its values."""


def _part_of(parameter: torch.Tensor) -> _Part:
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim(), parameter.detach().double().numpy()
    # A distributed checkpoint's plan says where the part lies, and does not use our own slices.
    (item,) = create_default_local_save_plan({"parameter": parameter}, is_coordinator=True).items
    assert item.tensor_data is not None
    offset = tuple(item.tensor_data.chunk.offsets)
    local = parameter.to_local().detach().double().numpy()
    assert local.shape == tuple(item.tensor_data.chunk.sizes)
    return tuple(parameter.shape), offset, local


def write_seed_checkpoint(options: list[str]) -> str:
    """Write a job's initial weights in a rank, whose process group stays in place.

    Args:
        options: As on the command line, without a TOML file.

    Returns:
        The checkpoint's folder.
    """
    with patch.object(dist, "destroy_process_group"):  # it is the pool's
        return str(make_seed_checkpoint(options))
