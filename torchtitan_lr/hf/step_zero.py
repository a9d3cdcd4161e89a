# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write weights as a checkpoint of step 0, tensor by tensor, with all that a run needs."""

import json
import warnings
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, step_folder
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checkpoints.saving import StepWriter
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import CONFIG_DIR
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.shards import WeightSource
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import MODEL_ARGS, write_model_args
from torchtitan_lr.training.fingerprint import TOKENIZER, model_fingerprint, tokenizer_digest

TRAIN_TOML = "train.toml"
TOKENIZER_FOLDER = "tokenizer"

LONGEST_TRAINED = 2048
"""Longest ``training.seq_len`` of the written TOML; the model's own window may be longer."""


def step_zero_of(out_dir: Path) -> Path:
    """Return the folder of the checkpoint in an output folder."""
    return Path(step_folder(out_dir / "checkpoint", 0))


def write_step_zero(source: WeightSource, out_dir: Path) -> None:
    """Write the checkpoint, its run's record, the model's arguments and a TOML to train with.

    The folder is laid out as a run's dump folder, so that every command for checkpoints reads it.

    Raises:
        ConfigError: The weights cannot be read, or are not finite.
    """
    args = source.args
    write_model_args(args, out_dir / MODEL_ARGS)
    toml = out_dir / TRAIN_TOML
    toml.write_text(build_toml(args, out_dir))
    fingerprint = model_fingerprint(args)
    tokenizer = out_dir / TOKENIZER_FOLDER
    if tokenizer.is_dir():
        fingerprint[TOKENIZER] = tokenizer_digest(str(tokenizer))
    # The longest text that the model can read; the TOML has the length to train with.
    window = f"--training.seq_len={args.max_seq_len}"
    config = build_job_config(
        [f"--job.config_file={toml.resolve()}", window, f"--job.dump_folder={out_dir.resolve()}"]
    )
    own = json.dumps(str(out_dir.resolve()))[1:-1]
    run = json.dumps(config.to_dict(), indent=2).replace(own, CONFIG_DIR)  # it may be moved
    write_weights(source, step_zero_of(out_dir), Record({"model": fingerprint}, json.loads(run)))
    (out_dir / RUN_CONFIG).write_text(run)


def write_weights(source: WeightSource, step_dir: Path, record: Record) -> None:
    """Write weights as a distributed checkpoint (DCP) with its record.

    Each tensor has a file of its own, and one at a time is in memory, beside what the source keeps.

    Raises:
        ConfigError: As for `write_step_zero`.
    """
    state: dict[str, Any] = {
        name: torch.empty(shape, dtype=source.dtype, device="meta")
        for name, shape in source.shapes.items()
    }
    step_dir.mkdir(parents=True)
    writer = StepWriter(step_dir, record)
    writer.per_thread_copy_ahead = 0  # else DCP reads by size where there is a GPU
    writer.single_file_per_rank = False  # DCP keeps the tensors of a file until it is written
    try:
        with warnings.catch_warnings():
            # DCP warns that it runs without a process group, which is what we ask for.
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=writer, planner=_Planner(source), no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        cause = next(iter(error.failures.values()))[0]
        raise cause from error


class _Planner(DefaultSavePlanner):
    """Reads a tensor when it is written; the state dict has its shape and dtype."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self._source = source
        self._names = set(source.shapes)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._names:
            return super().lookup_object(index)
        tensor = self._source.read([index.fqn])[index.fqn]
        if not bool(tensor.isfinite().all()):
            raise ConfigError("DIR", index.fqn, "finite weights")
        return tensor


def build_toml(args: LlamaArgs, out_dir: Path) -> str:
    """Return the TOML of a run that starts from the checkpoint."""
    model = {"name": args.model_family.model_name, "flavor": f"{CONFIG_DIR}/{MODEL_ARGS}"}
    if (out_dir / TOKENIZER_FOLDER).is_dir():
        model["hf_assets_path"] = f"{CONFIG_DIR}/{TOKENIZER_FOLDER}"
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": f"{CONFIG_DIR}/run"},
        "model": model,
        "training": {
            "dataset": "cpython",
            "local_batch_size": 1,
            "seq_len": min(args.max_seq_len, LONGEST_TRAINED),
            "steps": 1000,
        },
        "optimizer": {"lr": 1e-4},
        "lr_scheduler": {"warmup_ratio": 0.1, "decay_type": "cosine", "min_lr_factor": 0.1},
        "checkpoint": {
            "enable": True,
            "initial_load_path": f"{CONFIG_DIR}/checkpoint/step-0",
            "interval": 500,
        },
    }
    if args.model_family.gated:
        sections["low_rank"] = {"lax_gate": args.lax_gate}
    if args.lanes > 1:
        sections["caat"] = {"lanes": args.lanes, "sync_fraction": args.sync_fraction}
    head = f"# Written by torchtitan-lr import. Run: torchtitan-lr train {TRAIN_TOML}\n\n"
    return head + tomli_w.dumps(sections)
