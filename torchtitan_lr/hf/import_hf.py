# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Turn a folder of weights into a checkpoint of step 0: a Hugging Face LLaMA, or an export."""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torchtitan_lr.checkpoints.folders import unfinished
from torchtitan_lr.data.sources import Source
from torchtitan_lr.data.tokenizer import build_tokenizer, resolve_assets_path, vocabulary
from torchtitan_lr.errors import ConfigError, one_of
from torchtitan_lr.hf.exported import open_source
from torchtitan_lr.hf.loading import find_device
from torchtitan_lr.hf.origin import find_model, write_origin
from torchtitan_lr.hf.shards import WeightSource
from torchtitan_lr.hf.step_zero import (
    LONGEST_TRAINED,
    TOKENIZER_FOLDER,
    TRAIN_TOML,
    step_zero_of,
    write_step_zero,
)
from torchtitan_lr.hf.svd_import import (
    Batch,
    MatrixReport,
    TruncatedWeights,
    check_factorisable,
    factorised_args,
    limit_tokens,
)
from torchtitan_lr.hf.text import EvaluationSet, encoded
from torchtitan_lr.hf.tokenizer import import_tokenizer
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import FAMILIES

_SHIPPED = ("cpython", "python_stdlib")
"""Values of ``--calibration`` that are no paths: the corpus's training part."""

_WINDOWS = 8
"""Windows of the calibration text that are computed together."""


def import_folder(
    options: argparse.Namespace,
    report: Callable[[MatrixReport], object] = lambda report: None,
    notice: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Read a folder and write its checkpoint.

    Returns:
        ``checkpoint``, ``config`` (a TOML), ``model`` (its name), ``parameters``, ``tied``,
        ``tokenizer`` and ``matrices`` (one row per factorised matrix).

    Raises:
        ConfigError: The folder cannot be read, or its model cannot become the wanted one.
    """
    (folder, repository), out = find_model(str(options.folder)), options.out
    source, tied = open_source(folder)
    if options.dtype is not None:
        source = replace(source, dtype=getattr(torch, options.dtype))
    family = _wanted_family(options, source.args)
    args = source.args if family is None else factorised_args(source.args, family, options.rank)
    device = find_device(options.device)
    if tied:
        notice("the embedding is also the head there; here both are trained on their own")
    try:
        with unfinished(out) as aside:
            write_origin(folder, repository, aside)
            tokenizer = _copy_tokenizer(options.tokenizer, folder, aside, args, notice)
            weights: WeightSource = source
            if family is not None:
                batches = _calibration(options, tokenizer, args)
                weights = TruncatedWeights(source, args, batches, device, report)
            write_step_zero(weights, aside)
    except OSError as error:
        raise ConfigError("OUT", str(out), f"a writable folder ({error})") from error
    return {
        "checkpoint": str(step_zero_of(out)),
        "config": str(out / TRAIN_TOML),
        "model": args.model_family.model_name,
        "parameters": sum(math.prod(shape) for shape in weights.shapes.values()),
        "tied": tied,
        "tokenizer": "" if tokenizer is None else str(out / TOKENIZER_FOLDER),
        "matrices": [asdict(report) for report in getattr(weights, "reports", [])],
    }


def _wanted_family(options: argparse.Namespace, args: LlamaArgs) -> Any:
    """Return what a dense model is to become, None if every weight stays as it is."""
    name = options.family or args.family
    if name not in FAMILIES:
        raise ConfigError("--family", name, one_of(FAMILIES, name))
    if name == args.family:
        for key in ("rank", "calibration"):
            if getattr(options, key) is not None:
                want = "nothing, or --family svd with a dense model: the weights stay as they are"
                raise ConfigError(f"--{key}", getattr(options, key), want)
        return None
    if not FAMILIES[name].low_rank:
        want = f"{args.family} as in DIR; `torchtitan-lr export --format hf` multiplies factors"
        raise ConfigError("--family", name, want)
    family = check_factorisable(args, name)
    if options.rank is None:
        raise ConfigError("--rank", "nothing", "a rank such as a quarter of the model's width")
    return family


def _copy_tokenizer(
    given: Path | None, model: Path, out: Path, args: LlamaArgs, notice: Callable[[str], object]
) -> Any:
    """Copy a tokenizer that training can use: the given one, else that of the model's folder.

    Returns:
        The tokenizer; None if the model's folder has none, which `notice` got.

    Raises:
        ConfigError: ``--tokenizer`` cannot be used, or a file is a link out of its folder.
    """
    folder = resolve_assets_path(str(given or model))
    config = SimpleNamespace(model=SimpleNamespace(hf_assets_path=str(folder)))
    try:
        tokenizer = build_tokenizer(config)
        tokens = vocabulary(tokenizer)
        if tokens > args.vocab_size:
            want = f"at most {args.vocab_size} tokens, not {tokens}"
            raise ConfigError("--tokenizer", str(folder), want)
    except ConfigError as error:
        if given:
            raise ConfigError("--tokenizer", error.got, error.want) from error
        notice(f"without a tokenizer (model.hf_assets_path): {error}")
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
    if tokenizer is None:
        raise ConfigError("--calibration", name, "a tokenizer in DIR or in --tokenizer, too")
    source = Source("local", (name,), "--calibration", "train", options.text_column)
    if name in _SHIPPED:
        source = Source(name, (), "--calibration")
    length = min(args.max_seq_len, LONGEST_TRAINED)
    try:
        documents = partial(encoded, source, tokenizer, held_out=False)
        batches = EvaluationSet(documents, tokenizer.decode, length, _WINDOWS)
        return list(limit_tokens(batches, options.calibration_tokens))
    except ConfigError as error:
        raise ConfigError("--calibration", name, error.want) from error
