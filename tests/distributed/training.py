# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Short real runs of the trainer on the ranks of a pool, for comparing layouts."""

import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims

from tests.scripts import load_script
from torchtitan_lr.data.corpora import PythonStdlib
from torchtitan_lr.models.args import FAMILIES, LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS

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


SPOILT = "layers.1.feed_forward.w1.A.weight"
"""Whose gradient the fault ``nan_gradient`` spoils."""


def train(
    arguments: list[str],
    fault: str = "",
    dump_folder: str = "",
    exact: bool = True,
    everywhere: bool = False,
) -> dict[str, Any]:
    """Train on the calling process group; call it on every rank.

    Args:
        arguments: As on the command line.
        fault: A deliberate fault. ``average`` divides gradients by the ranks once more, as
            torchtitan's DDP path does; ``sigterm@3`` sends rank 1 a signal in step 3; ``nan@2``
            makes rank 1's loss NaN in step 2, ``nan_gradient@2`` one entry of one gradient. In a
            pipeline ``raw_loss`` backpropagates the loss's sum as torchtitan does, and
            ``reset_latents`` and ``detach_latents`` cut LaX's latents off at every boundary.
        dump_folder: Where to write; a new folder by default.
        exact: Whether everything that is float32 in the configuration is computed in float64.
        everywhere: Whether every rank returns the parameters, and not rank 0 alone.

    Returns:
        ``losses``, ``grad_norms`` (one a step), ``val_losses``, ``skipped_steps``, ``step``,
        ``dump_folder``, ``last_val_loss`` (as this rank knows it), ``state_dtypes`` (of the
        optimizer), ``ledger`` (this rank's rows of the last logged step) and ``parameters`` (full
        arrays by name).
    """
    import torch.distributed as dist
    import torchtitan.train as titan_train
    from torchtitan.tools.logging import logger

    from torchtitan_lr.checks.job import check_job_config
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.training import summary
    from torchtitan_lr.training.metrics import read_history

    logger.setLevel("ERROR")
    folders: list[Any] = [dump_folder or tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    config = build_job_config([*TINY, f"--job.dump_folder={folders[0]}", *arguments])
    with known_setup():
        check_job_config(config, dist.get_world_size(), "cpu")
    if exact:
        use_float64(config)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    rest = SimpleNamespace(**vars(time) | {"sleep": _no_sleep})
    trainer = None
    try:
        with (
            patch.object(titan_train, "time", rest),
            patch.object(summary, "draw_curve"),  # whole runs draw theirs in tests/integration
            known_setup(),
        ):
            trainer = _trainer_with(fault, config)
            trainer.train()
        result = {
            "step": trainer.step,
            "skipped_steps": trainer.skipped_steps,
            "dump_folder": folders[0],
            "ledger": trainer._ledger.rows() if trainer._ledger else [],
            "last_val_loss": trainer.validator.last_loss if config.validation.enable else None,
            "state_dtypes": _state_dtypes(trainer.optimizers),
            "parameters": _full_parameters(trainer.model_parts, everywhere),
        }
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if trainer is not None:
            trainer.close()
        del trainer
        torch._dynamo.reset()  # compiled blocks of many models in one process hit its limit
        gc.collect()  # torchtitan switches the collector off, and a trainer is full of cycles
        gc.freeze()  # what is left are caches: the next run's collection need not walk them
    dist.barrier()
    history = read_history(Path(folders[0]) / "metrics.jsonl")
    keys = {
        "losses": "loss_metrics/global_avg_loss",
        "grad_norms": "grad_norm",
        "val_losses": "validation_metrics/loss",
    }
    return result | {
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

LOSS_GAP = 0.01
"""
Limit of `loss_gap` for runs of five steps whose gradients or weights are rounded to bf16: four
times what another order of the sums changes on one process (0.0025, measured with TSR-Adam). A
rank of 8 for 12 gives 0.10, a gradient averaged once too often 0.16.
"""


def loss_gap(losses: list[float], expected: list[float]) -> float:
    """Return the largest difference of two runs' losses, over what the expected ones fell."""
    fallen = expected[0] - expected[-1]
    assert fallen > 0.1, "training did nothing"
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)) / fallen


def bf16_references(pool: Any, arguments: list[str]) -> list[dict[str, Any]]:
    """Train on one process: in float64, in float64 without moving, and with bf16 compute."""
    still = ["--optimizer.lr=1e-30"]
    return [pool.run(train, [*arguments, *more])[0] for more in ([], still, BF16)]


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


def write_seed_checkpoint(options: list[str]) -> str:
    """Call `scripts/make_seed_checkpoint.py` in a rank, whose process group it finds in place.

    Args:
        options: As on the command line, without a TOML file.

    Returns:
        The checkpoint's folder.
    """
    script = load_script("make_seed_checkpoint")
    with patch.object(torch.distributed, "destroy_process_group"):  # it is the pool's
        return str(script.make_seed_checkpoint(options))


_SELECT = PythonStdlib._select
_ENCODE = HuggingFaceTokenizer.encode


@contextmanager
def known_setup() -> Iterator[None]:
    """Set up once per process what is equal in all runs and takes longer than a `TINY` run's steps.

    The standard library's list of files and their tokens: that the trainer reads the right ones is
    shown by the unit tests of `torchtitan_lr.data` and by the whole runs in tests/integration,
    which tokenise for themselves. And the device meshes of equal degrees, which FSDP2 concatenates
    with tensor parallelism's anew for every parameter.
    """
    with (
        patch.object(PythonStdlib, "_select", _select_once),
        patch.object(HuggingFaceTokenizer, "encode", _encode_once),
        patch.object(ParallelDims, "build_mesh", _build_meshes_once),
        patch.object(DeviceMesh, "_concatenate", staticmethod(_concatenate_once)),
    ):
        yield


@cache
def _files_of(root: Path, split: Any) -> list[tuple[str, int]]:
    corpus = object.__new__(PythonStdlib)
    corpus.root = root
    return list(_SELECT(corpus, split))


def _select_once(corpus: PythonStdlib, split: Any) -> Iterator[tuple[str, int]]:
    """Walk the standard library once per process: it does not change between runs."""
    return iter(_files_of(corpus.root, split))


_TOKENS: dict[tuple[Any, ...], list[int]] = {}


def _encode_once(tokenizer: HuggingFaceTokenizer, text: str, **options: bool) -> list[int]:
    key = (tokenizer.tokenizer_path, text, *sorted(options.items()))
    if key not in _TOKENS:
        _TOKENS[key] = _ENCODE(tokenizer, text, **options)
    return list(_TOKENS[key])


_MESHES: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_BUILD_MESHES = ParallelDims.build_mesh
_CONCATENATED: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}
_CONCATENATE = DeviceMesh._concatenate


def _build_meshes_once(dims: ParallelDims) -> DeviceMesh:
    key = tuple(getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_"))
    if key not in _MESHES:
        _BUILD_MESHES(dims)
        _MESHES[key] = dims._world_mesh, dims._global_meshes, dims._meshes
    dims._world_mesh, dims._global_meshes, dims._meshes = _MESHES[key]
    return _MESHES[key][0]


def _concatenate_once(meshes: list[DeviceMesh]) -> DeviceMesh:
    key = tuple(map(id, meshes))
    if key not in _CONCATENATED:  # holds the meshes, so that no other one gets their ids
        _CONCATENATED[key] = meshes, _CONCATENATE(meshes)
    return _CONCATENATED[key][1]


def _no_sleep(seconds: float) -> None:
    """Upstream's rank 0 rests at the end until other processes end, which a pool's never do."""


def _trainer_with(fault: str, config: Any) -> Any:
    import torch.distributed as dist

    from torchtitan_lr.parallel.data_parallel import fsdp_modules
    from torchtitan_lr.training.trainer import Trainer

    kind, _, at = fault.partition("@")
    guilty = dist.get_rank() == min(1, dist.get_world_size() - 1)

    class FaultyTrainer(Trainer):
        def forward_backward_step(self, **kwargs: Any) -> Any:
            loss = super().forward_backward_step(**kwargs)
            if not guilty or str(self.step) != at:
                return loss
            if kind == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "nan_gradient":
                weight = dict(self.model_parts[0].named_parameters())[SPOILT]
                weight.grad.to_local().view(-1)[0] = float("nan")
            return loss * float("nan") if kind == "nan" else loss

    trainer = FaultyTrainer(config)
    if kind == "average":
        for module in fsdp_modules(trainer.model_parts):
            module.set_gradient_divide_factor(float(dist.get_world_size()))
    if kind == "raw_loss":
        setattr(trainer.pp_schedule, "normalize_by", lambda tokens: None)  # noqa: B010
    if kind in ("reset_latents", "detach_latents"):
        for part in trainer.model_parts:
            part.register_forward_pre_hook(partial(_cut_latents, kind))
    return trainer


def _cut_latents(kind: str, part: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *latents = args
    cut = [t.detach() if kind == "detach_latents" else t * 0.0 for t in latents]
    return x, *cut


def _state_dtypes(optimizers: Any) -> set[str]:
    states = [s for o in optimizers.optimizers for s in o.state.values()]
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def _full_parameters(model_parts: list[Any], everywhere: bool) -> dict[str, Any]:
    """Gather whole parameters as arrays by name; on rank 0 alone unless ``everywhere``."""
    import torch.distributed as dist

    parts: dict[str, _Part] = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            clean = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            parts[clean] = _part_of(parameter)
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
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    local = parameter.to_local().detach().double().numpy()
    assert local.shape == tuple(shape)
    return tuple(parameter.shape), tuple(offset), local
