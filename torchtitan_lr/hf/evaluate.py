# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Evaluate a checkpoint or an export on a corpus: loss, perplexity and bits per byte."""

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from torchtitan_lr.checkpoints.layout import RUN_CONFIG
from torchtitan_lr.console.progress import progress
from torchtitan_lr.data.blocks import Corpus, Split
from torchtitan_lr.data.corpora import Source, validation_source
from torchtitan_lr.data.documents import DocumentBorders, model_arguments, moved
from torchtitan_lr.data.evaluation import EvaluationSet
from torchtitan_lr.data.mixture import MixtureSource
from torchtitan_lr.data.validation import ValidationSet, build_validation_set
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.exported import is_export
from torchtitan_lr.hf.loading import (
    build_model_args,
    load_for_inference,
    load_tokenizer,
    read_run_config,
)
from torchtitan_lr.hf.ranks import (
    build_config,
    check_window,
    data_share,
    load_on_ranks,
    start_group,
    started_by_torchrun,
)
from torchtitan_lr.launch.environment import launched_ranks
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.loss import perplexity
from torchtitan_lr.training.device import bind_device
from torchtitan_lr.training.validate import sum_losses


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Load a model and evaluate it; on the ranks of torchrun every rank calls this.

    Returns:
        The results by name: ``loss`` in nats per token, ``perplexity``, ``bits_per_byte`` (None
        for the windows of validation, whose text is not whole), ``tokens``, ``documents``,
        ``bytes``, ``ranks``, and what was evaluated. They are the same on every rank.

    Raises:
        ConfigError: The model, corpus, layout or device cannot be used, or there is no text.
    """
    ranks = started_by_torchrun()
    if options.overrides and not ranks:
        key, _, value = options.overrides[0].removeprefix("--").partition("=")
        raise ConfigError(key, value, "torchrun --nproc_per_node=RANKS before the command")
    try:
        source = None if options.as_validated else _source(options)
        return (_on_ranks if ranks else _alone)(options, source)
    except ConfigError as error:
        key = _OPTIONS.get(error.key) if options.corpus else None
        if key is None:
            raise
        raise type(error)(key, error.got, error.want) from error


_OPTIONS = {"validation.dataset": "--corpus", "validation.dataset_path": "--path"}
"""What sets a key of the TOML here."""

Batches = EvaluationSet | ValidationSet


def _alone(options: argparse.Namespace, source: Source | MixtureSource | None) -> dict[str, Any]:
    """Evaluate in this process, without a process group."""
    model, tokenizer = load_for_inference(options.checkpoint, options.config, options.device)
    batches: Batches
    if source is None:
        config = read_run_config(options.checkpoint, options.config)
        batches, corpus = _validation_set(config, tokenizer)
        seq_len = config.validation.seq_len
    else:
        check_window(options.seq_len, model.model_args.max_seq_len)
        seq_len = options.seq_len or model.model_args.max_seq_len
        batches, corpus = _evaluation_set(options, source.open(), tokenizer, seq_len), _name(source)
    about = {"checkpoint": str(options.checkpoint), "corpus": corpus, "seq_len": seq_len}
    return about | _result(batches, corpus, lambda: total_loss(model, batches)) | {"ranks": 1}


def _on_ranks(options: argparse.Namespace, source: Source | MixtureSource | None) -> dict[str, Any]:
    """Evaluate on all ranks of torchrun; what can be refused is refused before they connect."""
    device_type = bind_device()
    if options.device not in ("", device_type):
        want = f"{device_type} under torchrun, or nothing"
        raise ConfigError("--device", options.device, want)
    ranks = launched_ranks("default")
    length = None if source is None else options.seq_len
    model = options.checkpoint, options.config, options.overrides
    config = build_config(*model, ranks, device_type, length)
    tokenizer = load_tokenizer(config, build_model_args(config))
    corpus = None if source is None else source.open()
    local = "" if device_type == "cpu" else f":{os.environ['LOCAL_RANK']}"
    device = torch.device(f"{device_type}{local}")
    if device_type != "cpu":
        getattr(torch, device_type).set_device(device)

    parallel_dims = start_group(config)
    total_loss_of = load_on_ranks(options.checkpoint, config, parallel_dims, device)
    seq_len, share = config.validation.seq_len, data_share(parallel_dims)
    batches: Batches
    if source is None or corpus is None:
        batches, name = _validation_set(config, tokenizer, share)
    else:
        batches, name = _evaluation_set(options, corpus, tokenizer, seq_len, share), _name(source)
    about = {"checkpoint": str(options.checkpoint), "corpus": name, "seq_len": seq_len}
    result = _result(batches, name, lambda: total_loss_of(batches))
    return about | result | {"ranks": ranks}


def _result(
    batches: Batches, corpus: str, total_loss: Callable[[], tuple[float, int]]
) -> dict[str, Any]:
    started = time.perf_counter()
    loss_sum, num_tokens = total_loss()
    if num_tokens == 0:
        raise ConfigError("--corpus", corpus, "a corpus with text")
    loss = loss_sum / num_tokens
    result: dict[str, Any] = {"documents": None, "bytes": None, "bits_per_byte": None}
    result |= {"tokens": num_tokens, "loss": loss, "perplexity": perplexity(loss)}
    result["seconds"] = time.perf_counter() - started
    if isinstance(batches, EvaluationSet):
        result |= {"documents": batches.num_documents, "bytes": batches.num_bytes}
        result["bits_per_byte"] = loss_sum / math.log(2) / batches.num_bytes
    return result


@torch.inference_mode()
def total_loss(model: LlamaModel, batches: Batches) -> tuple[float, int]:
    """Return the loss summed over all valid tokens, in nats, and their number."""
    device = model.freqs_cis.device

    def batch_loss(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        inputs, labels = moved((inputs, labels), device)
        loss: torch.Tensor = model(inputs["input"], targets=labels, **model_arguments(inputs))
        return loss.double()

    total = len(batches) if isinstance(batches, ValidationSet) else None
    loss_sum, num_tokens = sum_losses(progress(batches, "evaluation", total), batch_loss, device)
    return float(loss_sum), int(num_tokens)


def _source(options: argparse.Namespace) -> Source | MixtureSource:
    """Return the corpus of the command line, by default the run's validation corpus."""
    if options.corpus is None:
        if is_export(options.checkpoint) and options.config is None:
            want = "a corpus: an export has no record of its data"
            raise ConfigError("--corpus", options.corpus, want)
        config = read_run_config(options.checkpoint, options.config)
        try:
            return validation_source(config)
        except AttributeError as error:
            raise _incomplete(error) from error
    parts: dict[str, Split] = {"local": "all"}
    name = {"c4": "c4_validation"}.get(options.corpus, options.corpus)
    return Source(name, options.path, parts.get(name, "validation"), "validation")


def _name(source: Source | MixtureSource) -> str:
    return f"{source.name} ({source.split})"


def _evaluation_set(
    options: argparse.Namespace,
    corpus: Corpus,
    tokenizer: Any,
    seq_len: int,
    share: tuple[int, int] = (1, 0),
) -> EvaluationSet:
    borders = None
    if options.config is not None or not is_export(options.checkpoint):
        borders = DocumentBorders.of(read_run_config(options.checkpoint, options.config), tokenizer)
    documents = options.documents or None
    sizes = seq_len, options.batch_size, documents
    return EvaluationSet(corpus, tokenizer, *sizes, *share, borders=borders)


def _validation_set(
    config: Any, tokenizer: Any, share: tuple[int, int] = (1, 0)
) -> tuple[ValidationSet, str]:
    """Return this rank's share of the run's own validation set, and its name."""
    try:
        name = f"{validation_source(config).name} (as validated)"
        return build_validation_set(config, *share, tokenizer), name
    except AttributeError as error:
        raise _incomplete(error) from error


def _incomplete(error: AttributeError) -> ConfigError:
    want = "the complete record of a run, or --corpus"
    return ConfigError(RUN_CONFIG, str(error), want)
