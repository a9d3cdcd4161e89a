# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A trainer in this process, on the device under test; and where the host waits for a device."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import torchtitan_lr
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.titan import device as device_module
from torchtitan_lr.titan import logger
from torchtitan_lr.training.trainer import Batch, Trainer

SEQ, BATCH = 16, 2
MICRO_BATCHES = 2
IGNORED = -100

ARGUMENTS = [
    "--model.name=llama_cola",
    "--model.flavor=debug",
    f"--model.hf_assets_path={Path(torchtitan_lr.__file__).parent / 'data/assets/bpe4k'}",
    "--training.dataset=python_stdlib",
    f"--training.seq_len={SEQ}",
    f"--training.local_batch_size={BATCH}",
    f"--training.global_batch_size={BATCH * MICRO_BATCHES}",
    "--training.steps=9",
    "--training.dtype=float32",
    "--training.mixed_precision_param=float32",
    "--training.max_norm=0.1",
    "--lr_scheduler.warmup_steps=1",
    # What a step changes is compared, and fp32 rounds the weights that it is added to.
    "--optimizer.lr=0.1",
    # A first step of Adam divides a gradient by its own size: with a small ε an entry that is
    # rounding noise moves its weight by a full learning rate, in a random direction.
    "--optimizer.eps=1e-3",
    "--metrics.log_freq=100",
    "--validation.no_enable",
    "--checkpoint.no_enable",
]


@contextmanager
def trainer_on(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> Iterator[Trainer]:
    """Build a trainer of one rank; needs a process group."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    if device == "cpu":
        # torchtitan takes a GPU where there is one: until the test ends there is none for it.
        monkeypatch.setattr(device_module, "has_accelerator", lambda: False)
        for holder, name in device_module.device_holders():
            monkeypatch.setattr(holder, name, getattr(holder, name))
    config = build_job_config([*ARGUMENTS, f"--job.dump_folder={folder}", *more])
    check_job_config(config, 1, device)
    collects, level = gc.isenabled(), logger.level
    logger.setLevel("WARNING")
    trainer = Trainer(config)
    try:
        yield trainer
    finally:
        trainer.close()
        logger.setLevel(level)
        if collects:
            gc.enable()  # torchtitan switches it off


def micro_batches(vocab_size: int) -> list[Batch]:
    """The micro-batches of one step, on the host; each has other labels that do not count."""
    generator = torch.Generator().manual_seed(0)
    found: list[Batch] = []
    for skipped in (3, 9):
        tokens = torch.randint(vocab_size, (BATCH, SEQ + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, -skipped:] = IGNORED
        found.append(({"input": tokens[:, :-1]}, labels))
    return found


@contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """Raise where the host would wait for the device; on ``meta`` a read raises by itself."""
    if device.type == "meta":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
