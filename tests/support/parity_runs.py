# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Short runs of the real trainer in several layouts, and the differences between them."""

import gc
import os
import signal
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from tests.support.corpora import library_listed_once
from tests.support.rank_pool import RankPool, new_folder
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.prepare import prepare_for_ranks
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP
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
    # Adam's first steps divide a gradient by its own size. With the default 1e-8, an entry of pure
    # rounding noise would move its weight by a full learning rate in a random direction.
    "--optimizer.eps=1e-5",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--validation.no_enable",
    "--checkpoint.no_enable",
]
"""Arguments of a run of about a second; a test adds its layout."""

EXACT = 1e-9
"""
Limit of `largest_difference` between two fp64 runs of the same training. Rounding in fp64 is
1.1e-16 per operation; three steps accumulated at most 2.2e-14 (measured on fourteen layouts). A
gradient that is wrong gives more than 1e-3.
"""


def add_parity_flavors() -> None:
    """Add ``parity`` (2 layers) and ``parity4`` (4), whose widths all differ and divide by four."""
    for family in FAMILIES:
        low_rank = family != "full"
        for name, layers in (("parity", 2), ("parity4", 4)):
            FLAVORS[family][name] = LlamaArgs(
                family=family,
                dim=64,
                n_layers=layers,
                n_heads=8,
                n_kv_heads=4,
                ffn_dim=88,
                vocab_size=4096,
                rank_attention=12 if low_rank else 0,
                rank_ffn=20 if low_rank else 0,
                activation="fullrank" if family in ("full", "svd", "tanh") else "both",
            )


add_parity_flavors()


def degrees(tensor: int = 1, pipeline: int = 1, local_batch: int = 8) -> list[str]:
    """Return arguments for the parallel degrees, at most 4 micro-batches; FSDP2 has the rest."""
    arguments = [
        f"--parallelism.tensor_parallel_degree={tensor}",
        f"--parallelism.pipeline_parallel_degree={pipeline}",
        f"--training.local_batch_size={local_batch}",
    ]
    size = max(1, local_batch // 4) if pipeline > 1 else 1
    return [*arguments, f"--parallelism.pipeline_parallel_microbatch_size={size}"]


DEEP = ["--model.flavor=parity4"]
"""Arguments of a model with enough layers for four stages."""


def model(family: str) -> list[str]:
    return [f"--model.name=llama_{family}"]


def train(
    arguments: list[str],
    dump_folder: str = "",
    exact: bool = True,
    everywhere: bool = False,
    build: Callable[[Any], Trainer] = Trainer,
) -> dict[str, Any]:
    """Train, on every rank of a process group; return what `_result_of` and `_curves_of` do."""
    logger.setLevel("ERROR")
    folders: list[Any] = [dump_folder or new_folder()]
    dist.broadcast_object_list(folders)
    config = build_job_config([*TINY, f"--job.dump_folder={folders[0]}", *arguments])
    if exact:
        use_float64(config)
    with checked(config):
        return _train(config, everywhere, build)


def _train(config: Any, everywhere: bool, build: Callable[[Any], Trainer]) -> dict[str, Any]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    trainer = None
    try:
        trainer = build(config)
        trainer.train()
        result = _result_of(trainer, everywhere) | {"dump_folder": config.job.dump_folder}
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if trainer is not None:
            trainer.close()
        del trainer
        gc.collect()  # torchtitan disables the collector, and a trainer has many reference cycles
        gc.freeze()  # the rest are caches, which the next run's collection skips
    dist.barrier()
    return result | _curves_of(Path(config.job.dump_folder))


@contextmanager
def checked(config: Any) -> Iterator[None]:
    """Check a run and prepare its tokens on rank 0 for all, as a launch does; refuse it on all."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        usual = build_job_config(TINY).model.hf_assets_path == config.model.hf_assets_path
        try:
            # Listing the corpus of `TINY` takes longer than a step.
            with patch.dict(os.environ, _prepared() if usual else {}), library_listed_once():
                check_job_config(config, dist.get_world_size(), "cpu")
                found = [prepare_for_ranks(config)]
        except ConfigError as error:
            found = [error]
        except Exception:  # which may not travel
            found = [RuntimeError(traceback.format_exc())]
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    with patch.dict(os.environ, found[0]):
        yield


@cache
def _prepared() -> dict[str, str]:
    return prepare_for_ranks(build_job_config(TINY))


def _result_of(trainer: Trainer, everywhere: bool) -> dict[str, Any]:
    validated = trainer.job_config.validation.enable
    return {
        "step": trainer.step,
        "ledger": trainer._ledger.rows() if trainer._ledger else [],
        "last_val_loss": trainer.validator.last_loss if validated else None,
        "parameters": full_parameters(trainer.model_parts, everywhere),
    }


def _curves_of(folder: Path) -> dict[str, list[Any]]:
    history = read_history(folder / "metrics.jsonl")
    keys = {
        "losses": "loss_metrics/global_avg_loss",
        "grad_norms": "grad_norm",
        "tokens": "n_tokens_seen",
        "val_losses": "validation_metrics/loss",
    }
    return {
        name: [record[key] for record in history if key in record] for name, key in keys.items()
    }


def use_float64(config: Any) -> None:
    """Replace float32 by float64, which torchtitan has not; leave a bf16 run unchanged."""
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
Limit of `rounding_excess`. A layout in bf16 rounds different partial sums than one process. Its
error was at most 1.8 times that of one process after three steps, and 3.5 times after one step,
whose update depends almost only on the signs of the gradients (measured over the support matrix). A
gradient averaged once too often gives 16; bf16 master weights give 39.
"""

ROUNDING_OF_POLAR_FACTORS = 3.0
"""
Limit of `rounding_excess` after a step of a spectral optimizer, with ``floor=max``. The error of a
polar factor grows as its matrix's smallest singular values fall, so parameters differ more than
layouts do, and the largest error of one process is the scale: 0.09 to 0.17. A layout's was at most
1.1 times that (six draws of the support matrix). A matrix that moves in another direction has an
error of √2, 8 to 16 times that.
"""


def bf16_references(
    pool: RankPool, arguments: list[str], run: Callable[..., Any] = train
) -> list[dict[str, Any]]:
    """Train on one process: in float64, in float64 with a learning rate of almost 0, in bf16."""
    still = ["--optimizer.lr=1e-30", "--optimizer.adamw_lr=1e-30"]
    return [pool.run(run, [*arguments, *more])[0] for more in ([], still, BF16)]


def rounding_excess(
    run: dict[str, Any],
    references: list[dict[str, Any]],
    floor: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Compare a bf16 run's ‖w - w_exact‖ / ‖w_exact - w_start‖ with those of one process."""
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
    assert 1e-3 < statistics.median(usual.values()) < 0.2, f"the reference is no bf16 run: {usual}"
    least = floor([*usual.values()])
    return max(error / max(usual[name], least) for name, error in errors(run["parameters"]).items())


def full_parameters(
    model_parts: list[Any],
    everywhere: bool = False,
    what: Callable[[Any], torch.Tensor | None] = lambda parameter: parameter,
) -> dict[str, Any]:
    """Gather ``what`` of each parameter as an array by name; on rank 0 unless ``everywhere``."""
    parts: dict[str, _Part] = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            tensor = what(parameter)
            if tensor is not None:
                parts[clean_name(name)] = _part_of(tensor)
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
"""A parameter's global shape, the offset of this rank's part, and the part's values."""


def _part_of(parameter: torch.Tensor) -> _Part:
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim(), parameter.detach().double().numpy()
    # The offset comes from a distributed checkpoint's plan, which does not use our own slicing.
    (item,) = create_default_local_save_plan({"parameter": parameter}, is_coordinator=True).items
    assert item.tensor_data is not None
    offset = tuple(item.tensor_data.chunk.offsets)
    local = parameter.to_local().detach().double().numpy()
    assert local.shape == tuple(item.tensor_data.chunk.sizes)
    return tuple(parameter.shape), offset, local
