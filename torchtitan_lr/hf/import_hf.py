# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Turn a folder of weights into a checkpoint of step 0: a Hugging Face LLaMA, or an export."""

import argparse
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, step_folder, unfinished
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checkpoints.saving import StepWriter
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import CONFIG_DIR
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.console.log import say
from torchtitan_lr.data.sources import Source
from torchtitan_lr.data.tokenizer import resolve_assets_path
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.hf.export_tokenizer import import_tokenizer
from torchtitan_lr.hf.exported import read_args, read_weights
from torchtitan_lr.hf.svd_import import Batch, MatrixReport, factorise
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import MODEL_ARGS, write_model_args
from torchtitan_lr.training.evaluation import EvaluationSet, encoded
from torchtitan_lr.training.fingerprint import TOKENIZER, model_fingerprint, tokenizer_digest
from torchtitan_lr.training.loading import Weights, find_device, load_tokenizer

TRAIN_TOML = "train.toml"
TOKENIZER_FOLDER = "tokenizer"

LONGEST_TRAINED = 2048  # of ``training.seq_len`` in the TOML; the model's own window may be longer

# Files of a repository on the Hub that an import reads.
_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]

_SHIPPED = ("cpython", "python_stdlib")  # of ``--calibration``, no paths: their training parts
_WINDOWS = 8  # windows of the calibration text that are computed together


def import_folder(options: argparse.Namespace) -> dict[str, Any]:
    """Read a folder and write its checkpoint.

    Returns ``checkpoint``, ``config`` (a TOML), ``model`` (its name), ``parameters`` and
    ``matrices`` (a `MatrixReport` as a dictionary of each). A ConfigError says that the folder
    cannot be read, or its model cannot become the wanted one.
    """
    folder, out = find_model(str(options.folder)), options.out
    args, tied = read_args(folder)
    made = _wanted_args(options, args)
    device = find_device(options.device)
    weights = read_weights(folder, args, tied)
    dtype = torch.promote_types(next(iter(weights.values())).dtype, torch.float32)
    dtype = dtype if options.dtype is None else getattr(torch, options.dtype)
    if tied:
        say("the embedding is also the head there; here both are trained on their own")
    matrices = list[MatrixReport]()
    try:
        with unfinished(out) as aside:
            tokenizer = _copy_tokenizer(options.tokenizer, folder, aside, args)
            if made is not args:
                batches = _calibration(options, tokenizer, args)
                weights, matrices = factorise(args, weights, made, batches, device, dtype)
            for name in weights:  # one after another: a large model fits in memory once
                weights[name] = weights[name].to(dtype)
            write_step_zero(made, weights, aside)
    except OSError as error:
        raise ConfigError("OUT", str(out), f"a writable folder ({error})") from error
    return {
        "checkpoint": step_folder(out / "checkpoint", 0),
        "config": str(out / TRAIN_TOML),
        "model": made.model_family.model_name,
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "matrices": [asdict(matrix) for matrix in matrices],
    }


def find_model(name: str) -> Path:
    """Find the folder of a model: of this machine, else of the Hub, downloaded.

    A ConfigError says that the Hub has no such model, or cannot be reached.
    """
    folder, (owner, _, model) = user_path(name, "DIR"), name.partition("/")
    if folder.exists() or not owner or not model or "/" in model or owner in (".", "..", "~"):
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, etag_timeout=5))
    # Not found, gated, no network: each version and each layer below has exceptions of its own.
    except Exception as error:
        want = f"a folder, or a model of the Hub that can be read here ({type(error).__name__}); on"
        want += f" a machine with a network `hf download {name} --local-dir FOLDER` writes a folder"
        raise ConfigError("DIR", name, want) from error


def write_step_zero(args: LlamaArgs, weights: Weights, out_dir: Path) -> None:
    """Write the checkpoint, its run's record, the model's arguments and a TOML to train with.

    The folder is laid out as a run's dump folder, so that every command for checkpoints reads it. A
    ConfigError says that the weights are not finite.
    """
    write_model_args(args, out_dir / MODEL_ARGS)
    toml = out_dir / TRAIN_TOML
    toml.write_text(_train_toml(args, out_dir))
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
    step_dir = Path(step_folder(out_dir / "checkpoint", 0))
    step_dir.mkdir(parents=True)
    writer = StepWriter(step_dir, Record({"model": fingerprint}, json.loads(run)))
    for name, tensor in weights.items():
        require(tensor.isfinite().all(), "DIR", name, "finite weights")
    try:
        with warnings.catch_warnings():
            # DCP warns that it runs without a process group, which is what we ask for.
            warnings.simplefilter("ignore")
            dcp.save(dict(weights), storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        cause = next(iter(error.failures.values()))[0]
        raise cause from error
    (out_dir / RUN_CONFIG).write_text(run)


def _train_toml(args: LlamaArgs, out_dir: Path) -> str:
    """Return the TOML of a run that starts from the checkpoint."""
    seq_len = min(args.max_seq_len, LONGEST_TRAINED)
    model = {"name": args.model_family.model_name, "flavor": f"{CONFIG_DIR}/{MODEL_ARGS}"}
    if (out_dir / TOKENIZER_FOLDER).is_dir():
        model["hf_assets_path"] = f"{CONFIG_DIR}/{TOKENIZER_FOLDER}"
    batches = {"local_batch_size": 1, "global_batch_size": 16}
    start = f"{CONFIG_DIR}/checkpoint/step-0"
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": f"{CONFIG_DIR}/run"},
        "model": model,
        "training": {"dataset": "cpython", **batches, "seq_len": seq_len, "steps": 1000},
        "optimizer": {"lr": 1e-4},
        "lr_scheduler": {"warmup_ratio": 0.1, "decay_type": "cosine", "min_lr_factor": 0.1},
        "validation": {"enable": True, "seq_len": seq_len, "freq": 100, "steps": 20},
        "checkpoint": {"enable": True, "initial_load_path": start, "interval": 500},
    }
    if args.model_family.gated:
        sections["low_rank"] = {"lax_gate": args.lax_gate}
    if args.lanes > 1:
        sections["caat"] = {"lanes": args.lanes, "sync_fraction": args.sync_fraction}
    head = f"# Written by torchtitan-lr import. Run: torchtitan-lr train {TRAIN_TOML}\n"
    head += "# Your own text: --training.dataset=local --training.dataset_path=FILES\n\n"
    return head + tomli_w.dumps(sections)


def _wanted_args(options: argparse.Namespace, args: LlamaArgs) -> LlamaArgs:
    """Return the arguments of what a model is to become: its own if every weight stays as it is."""
    name, rank = options.family or args.family, options.rank
    if name == args.family:
        for key in ("rank", "calibration"):
            want = "nothing, or --family svd with a dense model: the weights stay as they are"
            given = getattr(options, key)
            require(given is None, f"--{key}", given, want)
        return args
    want = f"{args.family} as in DIR, or svd of a dense LLaMA without lanes: a nonlinearity in the "
    want += "bottleneck has no counterpart in a dense model"
    fits = name in FAMILIES and FAMILIES[name].factorises and not args.low_rank and args.lanes == 1
    require(fits, "--family", name, want)
    largest = min(args.dim, args.ffn_dim)
    want = f"a rank from 1 to {largest}, the model's smallest width, such as a quarter of it"
    require(rank is not None and 0 < rank <= largest, "--rank", rank, want)
    return replace(args, family=name, activation="fullrank", rank_attention=rank, rank_ffn=rank)


def _copy_tokenizer(given: Path | None, model: Path, out: Path, args: LlamaArgs) -> Any:
    """Copy a tokenizer that training can use: the given one, else that of the model's folder.

    Returns it, or None if that folder has none. A ConfigError says that the given one cannot be
    used, or a file is a link out of its folder.
    """
    folder = resolve_assets_path(str(given or model))
    try:
        tokenizer = load_tokenizer(str(folder), args)
    except ConfigError as error:
        if given:
            raise ConfigError("--tokenizer", error.got, error.want) from error
        say(f"without a tokenizer (model.hf_assets_path): {error}")
        return None
    import_tokenizer(folder, model, out / TOKENIZER_FOLDER)
    return tokenizer


def _calibration(
    options: argparse.Namespace, tokenizer: Any, args: LlamaArgs
) -> Iterable[Batch] | None:
    """Open the calibration text; None without one."""
    name = options.calibration
    if name is None:
        return None
    want = "a tokenizer in DIR or in --tokenizer, too"
    require(tokenizer is not None, "--calibration", name, want)
    source = Source("local", (name,), "--calibration", "train", options.text_column)
    if name in _SHIPPED:
        source = Source(name, (), "--calibration")
    length = min(args.max_seq_len, LONGEST_TRAINED)
    try:
        documents = partial(encoded, source, tokenizer, held_out=False)
        batches = EvaluationSet(documents, tokenizer.decode, length, _WINDOWS)
        return list(islice(batches, -(-options.calibration_tokens // (_WINDOWS * length))))
    except ConfigError as error:
        raise ConfigError("--calibration", name, error.want) from error
