# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Short real runs of the trainer on the ranks of a pool, for comparing layouts."""

import gc
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

TINY = [
    "--model.flavor=debug",
    "--training.dataset=python_stdlib",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--training.steps=5",
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


SPOILT = "layers.1.feed_forward.w1.A.weight"
"""Whose gradient the fault ``nan_gradient`` spoils."""


def train(arguments: list[str], fault: str = "", dump_folder: str = "") -> dict[str, Any]:
    """Train on the calling process group; call it on every rank.

    Args:
        arguments: As on the command line.
        fault: A deliberate fault. ``average`` divides gradients by the ranks once more, as
            torchtitan's DDP path does; ``sigterm@3`` sends rank 1 a signal in step 3; ``nan@2``
            makes rank 1's loss NaN in step 2, ``nan_gradient@2`` one entry of one gradient. In a
            pipeline ``raw_loss`` backpropagates the loss's sum as torchtitan does, and
            ``reset_latents`` and ``detach_latents`` cut LaX's latents off at every boundary.
        dump_folder: Where to write; a new folder by default.

    Returns:
        ``losses``, ``grad_norms`` (one a step), ``val_losses``, ``skipped_steps``, ``step``,
        ``dump_folder``, ``last_val_loss`` (as this rank knows it), ``ledger`` (this
        rank's rows of the last logged step) and ``parameters`` (full arrays by name).
    """
    import torch
    import torch.distributed as dist
    import torchtitan.train as titan_train
    from torchtitan.tools.logging import logger

    from torchtitan_lr.config_checks import build_job_config, check_job_config
    from torchtitan_lr.metrics import read_history

    logger.setLevel("WARNING")
    folders: list[Any] = [dump_folder or tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    config = build_job_config([*TINY, f"--job.dump_folder={folders[0]}", *arguments])
    check_job_config(config, dist.get_world_size(), "cpu")
    trainer = _trainer_with(fault, config)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with patch.object(
            titan_train, "time", SimpleNamespace(**vars(time) | {"sleep": _no_sleep})
        ):
            trainer.train()
        result = {
            "step": trainer.step,
            "skipped_steps": trainer.skipped_steps,
            "dump_folder": folders[0],
            "ledger": trainer._ledger.rows() if trainer._ledger else [],
            "last_val_loss": trainer.validator.last_loss if config.validation.enable else None,
            "parameters": _full_parameters(trainer.model_parts),
        }
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        trainer.close()
        del trainer
        torch._dynamo.reset()  # compiled blocks of many models in one process hit its limit
        gc.collect()  # torchtitan switches the collector off, and a trainer is full of cycles
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


def _no_sleep(seconds: float) -> None:
    """Upstream's rank 0 rests at the end until other processes end, which a pool's never do."""


def _trainer_with(fault: str, config: Any) -> Any:
    import torch.distributed as dist

    from torchtitan_lr.parallel.data_parallel import fsdp_modules
    from torchtitan_lr.train import Trainer

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


def _full_parameters(model_parts: list[Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    parameters = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            clean = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            parameters[clean] = full.detach().float().numpy().copy()
    # Pipeline stages have different ones.
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, parameters)
    return {name: value for rank in everywhere for name, value in sorted(rank.items())}
