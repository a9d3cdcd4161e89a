# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Short real runs of the trainer on the ranks of a pool, for comparing layouts."""

import gc
import tempfile
from pathlib import Path
from typing import Any

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


def train(arguments: list[str], break_gradients: str = "") -> dict[str, Any]:
    """Train on the calling process group; call it on every rank.

    Args:
        arguments: As on the command line.
        break_gradients: A deliberate fault for negative controls: ``average`` divides gradients
            by the ranks once more, as torchtitan's DDP path does.

    Returns:
        ``losses``, ``grad_norms`` (one a step) and ``parameters`` (full arrays by name).
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torchtitan.tools.logging import logger

    from torchtitan_lr.config_checks import build_job_config, check_job_config
    from torchtitan_lr.metrics import read_history
    from torchtitan_lr.parallel.data_parallel import fsdp_modules
    from torchtitan_lr.train import Trainer

    logger.setLevel("WARNING")
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    config = build_job_config([f"--job.dump_folder={folders[0]}", *TINY, *arguments])
    check_job_config(config, dist.get_world_size(), "cpu")
    trainer = Trainer(config)
    if break_gradients == "average":
        for module in fsdp_modules(trainer.model_parts):
            module.set_gradient_divide_factor(float(dist.get_world_size()))
    trainer.train()
    parameters = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            parameters[_clean(name)] = full.detach().float().numpy().copy()
    trainer.close()
    del trainer, part, parameter, full
    gc.collect()  # torchtitan switches the collector off, and a trainer is full of cycles
    history = read_history(Path(folders[0]) / "metrics.jsonl")
    return {
        "losses": [record["loss_metrics/global_avg_loss"] for record in history],
        "grad_norms": [record["grad_norm"] for record in history],
        "parameters": parameters,
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


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
