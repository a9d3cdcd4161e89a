# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of the values of a configuration: one topic each, one line each.

Every check takes the configuration, the number of ranks of the whole run and the device type
(``cpu``, ``cuda`` or ``xpu``), and raises :class:`ConfigError` or returns nothing.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.layout import (
    LANES,
    RUN_CONFIG,
    TRAINING_STATES,
    complete_steps,
    is_complete,
    is_dcp,
    step_folder,
)
from torchtitan_lr.config.methods import TSR
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.training.history import HISTORY_FILE


def data_parallel_degree(config: Any, world_size: int) -> int:
    """Return the number of data-parallel ranks: replicated times sharded."""
    sections = config.parallelism
    others = sections.tensor_parallel_degree * sections.pipeline_parallel_degree
    return max(1, world_size // others)


def _require(ok: bool, key: str, got: object, want: str) -> None:
    if not ok:
        raise ConfigError(key, got, want)


def _positive(config: Any, *keys: str) -> None:
    for key in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        _require(value > 0, key, value, "a positive number")


def check_training(config: Any, world_size: int, device_type: str) -> None:
    """Check sizes, steps and batch of ``[training]``."""
    _positive(
        config,
        "training.seq_len",
        "training.local_batch_size",
        "training.steps",
        "training.gc_freq",
        "training.max_norm",
    )
    skipped = config.training.max_skipped_steps
    _require(skipped >= 0, "training.max_skipped_steps", skipped, "0 or a positive integer")
    bad = config.training.max_bad_records
    _require(bad >= 0, "training.max_bad_records", bad, "0 or a positive integer")
    degree = data_parallel_degree(config, world_size)
    unit = config.training.local_batch_size * degree
    batch = config.training.global_batch_size
    if batch != -1 and (batch <= 0 or batch % unit):
        want = (
            f"a multiple of {unit} (training.local_batch_size {config.training.local_batch_size} "
            f"x {degree} data-parallel ranks) such as {max(1, round(batch / unit)) * unit}, or -1"
        )
        raise ConfigError("training.global_batch_size", batch, want)


def check_optimizer(config: Any, world_size: int, device_type: str) -> None:
    """Check the ranges of ``[optimizer]``; NaN fails each of them."""
    optimizer = config.optimizer
    names = ("AdamW", "Adam", TSR)
    want = f"'AdamW', 'Adam' or {TSR!r}"
    _require(optimizer.name in names, "optimizer.name", optimizer.name, want)
    lr = optimizer.lr
    _require(0 < lr < math.inf, "optimizer.lr", lr, "a positive number such as 0.001")
    for name in ("beta1", "beta2"):
        beta = getattr(optimizer, name)
        _require(0 <= beta < 1, f"optimizer.{name}", beta, "a number in [0, 1) such as 0.9")
    _require(0 < optimizer.eps < math.inf, "optimizer.eps", optimizer.eps, "a number such as 1e-8")
    decay = optimizer.weight_decay
    _require(0 <= decay < math.inf, "optimizer.weight_decay", decay, "a number of at least 0")


def check_lr_scheduler(config: Any, world_size: int, device_type: str) -> None:
    """Check that the schedule covers the whole run."""
    schedule = config.lr_scheduler
    total = config.training.steps if schedule.total_steps is None else schedule.total_steps
    _require(total > 0, "lr_scheduler.total_steps", total, "a positive integer")
    warmup = schedule.warmup_steps
    _require(warmup >= 0, "lr_scheduler.warmup_steps", warmup, "0 or a positive integer")
    # A warm-up longer than the run is allowed: --training.steps=10 is a common trial run, and
    # torchtitan shortens the warm-up with a warning.
    want = f"at least training.steps ({config.training.steps}): the schedule ends there"
    _require(total >= config.training.steps, "lr_scheduler.total_steps", total, want)
    for name in ("decay_ratio", "min_lr_factor"):
        value = getattr(schedule, name)
        ok = value is None or 0 <= value <= 1
        _require(ok, f"lr_scheduler.{name}", value, "a number from 0 to 1")


def check_validation(config: Any, world_size: int, device_type: str) -> None:
    """Check the sizes of ``[validation]``."""
    if not config.validation.enable:
        return
    _positive(config, "validation.seq_len", "validation.local_batch_size", "validation.freq")
    limit = config.training.seq_len
    want = f"at most training.seq_len ({limit}): there are no rotary positions beyond it"
    length = config.validation.seq_len
    _require(length <= limit, "validation.seq_len", length, want)
    steps = config.validation.steps
    _require(steps == -1 or steps > 0, "validation.steps", steps, "a positive integer or -1")


def check_reporting(config: Any, world_size: int, device_type: str) -> None:
    """Check frequencies, seed and time-outs."""
    _positive(
        config,
        "metrics.log_freq",
        "comm.init_timeout_seconds",
        "comm.train_timeout_seconds",
    )
    for name in ("init_timeout_seconds", "train_timeout_seconds"):
        seconds = getattr(config.comm, name)
        _require(seconds <= 10**9, f"comm.{name}", seconds, "at most 10**9 seconds (30 years)")
    seed = config.debug.seed
    _require(0 <= seed < 2**63, "debug.seed", seed, "an integer from 0 to 2**63 - 1")
    profiling = config.profiling
    if profiling.enable_profiling:
        least = profiling.profiler_active + profiling.profiler_warmup
        want = f"at least profiler_active + profiler_warmup ({least})"
        freq = profiling.profile_freq
        _require(freq >= max(1, least), "profiling.profile_freq", freq, want)


def check_dump_folder(config: Any, world_size: int, device_type: str) -> None:
    """Check that the dump folder, its folders and its files exist or can be created."""
    folder = Path(os.path.abspath(config.job.dump_folder))
    _check_folder(folder, "job.dump_folder", config.job.dump_folder)
    profiling, metrics = config.profiling, config.metrics
    written = {
        "checkpoint.folder": config.checkpoint.enable,
        "metrics.save_tb_folder": metrics.enable_tensorboard or metrics.enable_wandb,
        "profiling.save_traces_folder": profiling.enable_profiling,
        "profiling.save_memory_snapshot_folder": profiling.enable_memory_snapshot,
        "comm.save_traces_folder": config.comm.trace_buf_size > 0,
    }
    for key in (key for key, used in written.items() if used):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        _check_folder(folder / user_path(value, key), key, value)
    for name in (HISTORY_FILE, config.job.save_config_file or RUN_CONFIG):
        path = folder / name
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            want = f"a folder in which {name} is a file to write to, which {path} is not"
            raise ConfigError("job.dump_folder", config.job.dump_folder, want)


def _check_folder(folder: Path, key: str, value: str) -> None:
    """Raise for a folder that cannot be created or written to."""
    user_path(str(folder), key)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    ok = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if not ok:
        lets = "lets you make" if nearest.is_dir() else "does not block: it is a file"
        raise ConfigError(key, value, f"a folder that {nearest} {lets}")


def check_checkpoint(config: Any, world_size: int, device_type: str) -> None:
    """Check what ``[checkpoint]`` saves, and its load paths."""
    checkpoint = config.checkpoint
    _positive(config, "checkpoint.interval")
    keep, step = checkpoint.keep_latest_k, checkpoint.load_step
    want = "0 (keep all) or at least 2: the newest may still be in the process of being saved"
    _require(keep == 0 or keep >= 2, "checkpoint.keep_latest_k", keep, want)
    _require(step >= -1, "checkpoint.load_step", step, "a step, or -1 for the newest")
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        want = "false, or checkpoint.last_save_model_only = true: safetensors hold only tensors"
        raise ConfigError("checkpoint.last_save_in_hf", True, want)
    parts = ("model", *(name for name in TRAINING_STATES if name != LANES))
    for name in checkpoint.exclude_from_loading:
        want = "some of " + ", ".join(parts)
        _require(name in parts, "checkpoint.exclude_from_loading", name, want)
    if checkpoint.create_seed_checkpoint:
        key = "checkpoint.create_seed_checkpoint"
        _require(checkpoint.enable, key, True, "checkpoint.enable = true with it")
        _require(world_size == 1, key, True, f"one rank (NGPU=1), not {world_size}")
    if checkpoint.enable:
        _check_load_paths(config)


def _check_load_paths(config: Any) -> None:
    checkpoint = config.checkpoint
    folder = Path(config.job.dump_folder) / checkpoint.folder
    step = checkpoint.load_step
    if step != -1 and not is_complete(step_folder(folder, step)):
        steps = complete_steps(folder)
        have = (
            f"one of {', '.join(map(str, steps))}" if steps else f"-1: {folder} has no checkpoint"
        )
        raise ConfigError("checkpoint.load_step", step, have)
    path = checkpoint.initial_load_path
    in_hf = checkpoint.initial_load_in_hf
    if path and not (os.path.exists(path) if in_hf else is_dcp(path)):
        want = "the folder of one complete checkpoint such as outputs/checkpoint/step-100"
        for parent in (Path(path), Path(path).parent):
            if steps := complete_steps(parent):
                want += f"; in {parent} are the steps {', '.join(map(str, steps))}"
                break
        raise ConfigError("checkpoint.initial_load_path", path, want)
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        want = "false, or checkpoint.initial_load_model_only = true"
        raise ConfigError("checkpoint.initial_load_in_hf", True, want)
    if checkpoint.initial_load_in_hf_quantized:
        raise ConfigError("checkpoint.initial_load_in_hf_quantized", True, "false: not supported")


def check_model(config: Any, world_size: int, device_type: str) -> None:
    """Check that the model exists and that its shape fits ``[low_rank]``."""
    import torchtitan_lr.training.register  # noqa: F401  (registers ours)
    from torchtitan_lr.titan.specs import get_train_spec, registered_specs

    names = sorted(registered_specs())
    name, flavor = config.model.name, config.model.flavor
    _require(name in names, "model.name", name, "one of " + ", ".join(names))
    flavors = get_train_spec(name).model_args
    _require(flavor in flavors, "model.flavor", flavor, "one of " + ", ".join(flavors))
    model_args: Any = flavors[flavor]
    model_args.update_from_config(config)
    rank = config.low_rank.rank  # unused if both groups have a rank of their own
    _require(rank >= 0, "low_rank.rank", rank, "0 (the flavor's) or a positive integer")


def check_vocabulary(config: Any, world_size: int, device_type: str) -> None:
    """Check that the tokenizer exists and fits the vocabulary; call this after `check_model`."""
    from torchtitan_lr.data.tokenizer import check_tokenizer
    from torchtitan_lr.titan.specs import get_train_spec

    name, flavor = config.model.name, config.model.flavor
    model_args: Any = get_train_spec(name).model_args[flavor]
    model_args.update_from_config(config)
    tokens = check_tokenizer(config)
    if tokens > model_args.vocab_size:
        want = (
            f"a tokenizer of at most {model_args.vocab_size} tokens for {name} {flavor}, "
            f"or model.vocab_size = {tokens}: this one has {tokens}"
        )
        raise ConfigError("model.hf_assets_path", config.model.hf_assets_path, want)


def check_stored_model(config: Any, world_size: int, device_type: str) -> None:
    """Check that the checkpoint to resume from holds this model; reads its manifest only."""
    from torchtitan_lr.checkpoints.manifest import read_manifest
    from torchtitan_lr.checkpoints.safe_metadata import DamagedError
    from torchtitan_lr.titan.specs import get_train_spec
    from torchtitan_lr.training.fingerprint import (
        TOKENIZER,
        check_fingerprint,
        model_fingerprint,
        tokenizer_digest,
    )

    path = _stored_model(config)
    if path is None:
        return
    try:
        manifest = read_manifest(path)
    except DamagedError:  # the ranks look for an undamaged one
        return
    model_args: Any = get_train_spec(config.model.name).model_args[config.model.flavor]
    model_args.update_from_config(config)
    digest = tokenizer_digest(config.model.hf_assets_path)
    if manifest is not None:
        here = model_fingerprint(model_args) | {TOKENIZER: digest}
        check_fingerprint(manifest.model, here, path)


def _stored_model(config: Any) -> str | None:
    """Return the checkpoint that must hold this model, None without one."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return None
    folder = Path(config.job.dump_folder) / checkpoint.folder
    if steps := complete_steps(folder):
        return step_folder(
            folder, steps[-1] if checkpoint.load_step == -1 else checkpoint.load_step
        )
    any_model = checkpoint.initial_load_in_hf or checkpoint.initial_load_other_model
    return None if any_model else checkpoint.initial_load_path


def check_data(config: Any, world_size: int, device_type: str) -> None:
    """Check that the corpora are prepared and fill a sequence; this prepares what is missing."""
    from torchtitan_lr.data.checks import check_corpora

    check_corpora(config, world_size)


Check = Callable[[Any, int, str], None]

VALUE_CHECKS: tuple[Check, ...] = (
    check_training,
    check_optimizer,
    check_lr_scheduler,
    check_validation,
    check_reporting,
    check_dump_folder,
    check_checkpoint,
    check_model,
    check_vocabulary,
    check_stored_model,
    check_data,
)
"""The checks of values, in the order of :func:`check_job_config`: slow ones last."""

FILE_CHECKS: tuple[Check, ...] = (
    check_dump_folder,
    check_checkpoint,
    check_vocabulary,
    check_stored_model,
    check_data,
)
"""The checks of files on this machine, which an estimate skips."""
