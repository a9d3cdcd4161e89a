# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Evaluate a checkpoint on a corpus: loss, perplexity and bits per byte."""

import argparse
import math
import time
from typing import Any

import torch

from torchtitan_lr.checkpoints.layout import RUN_CONFIG
from torchtitan_lr.data.corpora import Source, Split, validation_source
from torchtitan_lr.data.documents import DocumentBorders, model_arguments, moved
from torchtitan_lr.data.evaluation import EvaluationSet
from torchtitan_lr.data.mixture import MixtureSource
from torchtitan_lr.data.validation import ValidationSet, build_validation_set
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.loss import cross_entropy_sum, perplexity
from torchtitan_lr.tools.loading import load_for_inference, read_run_config
from torchtitan_lr.training.validate import sum_losses


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Load a checkpoint and evaluate it.

    Args:
        options: Result of ``parse_args`` of ``scripts/evaluate.py``.

    Returns:
        The results by name: ``loss`` in nats per token, ``perplexity``, ``bits_per_byte`` (None
        for the windows of validation, whose text is not whole), ``tokens``, ``documents``,
        ``bytes``, and what was evaluated.

    Raises:
        ConfigError: The checkpoint, corpus or device cannot be used, or there is no text.
    """
    try:
        return _evaluate(options, None if options.as_validated else _source(options))
    except ConfigError as error:
        key = _OPTIONS.get(error.key) if options.corpus else None
        if key is None:
            raise
        raise type(error)(key, error.got, error.want) from error


_OPTIONS = {"validation.dataset": "--corpus", "validation.dataset_path": "--path"}
"""What sets a key of the TOML here."""


def _evaluate(options: argparse.Namespace, source: Source | MixtureSource | None) -> dict[str, Any]:
    model, tokenizer = load_for_inference(options.checkpoint, options.config, options.device)
    batches: EvaluationSet | ValidationSet
    if source is None:
        batches, corpus, seq_len = _validation_set(options, tokenizer)
    else:
        seq_len = _seq_len(model, options)
        corpus, documents = f"{source.name} ({source.split})", options.documents or None
        record = read_run_config(options.checkpoint, options.config)
        borders = DocumentBorders.of(record, tokenizer)
        texts = source.open()
        batches = EvaluationSet(texts, tokenizer, seq_len, options.batch_size, documents, borders)
    started = time.perf_counter()
    loss_sum, num_tokens = total_loss(model, batches)
    if num_tokens == 0:
        raise ConfigError("--corpus", corpus, "a corpus with text")
    loss = loss_sum / num_tokens
    result = {"checkpoint": str(options.checkpoint), "corpus": corpus, "seq_len": seq_len}
    result |= {"documents": None, "bytes": None, "bits_per_byte": None}
    result |= {"tokens": num_tokens, "loss": loss, "perplexity": perplexity(loss)}
    result["seconds"] = time.perf_counter() - started
    if isinstance(batches, EvaluationSet):
        result |= {"documents": batches.num_documents, "bytes": batches.num_bytes}
        result["bits_per_byte"] = loss_sum / math.log(2) / batches.num_bytes
    return result


@torch.inference_mode()
def total_loss(model: LlamaModel, batches: EvaluationSet | ValidationSet) -> tuple[float, int]:
    """Return the loss summed over all valid tokens, in nats, and their number.

    Args:
        model: The model, on one device.
        batches: Inputs and labels, on the CPU.
    """
    device = model.freqs_cis.device

    def batch_loss(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        inputs, labels = moved((inputs, labels), device)
        logits = model(inputs["input"], **model_arguments(inputs))
        return cross_entropy_sum(logits, labels).double()

    loss_sum, num_tokens = sum_losses(batches, batch_loss, device)
    return float(loss_sum), int(num_tokens)


def _source(options: argparse.Namespace) -> Source | MixtureSource:
    """Return the corpus of the command line, by default the run's validation corpus."""
    if options.corpus is None:
        config = read_run_config(options.checkpoint, options.config)
        try:
            return validation_source(config)
        except AttributeError as error:
            raise _incomplete(error) from error
    parts: dict[str, Split] = {"local": "all"}
    return Source(
        options.corpus, options.path, parts.get(options.corpus, "validation"), "validation"
    )


def _validation_set(options: argparse.Namespace, tokenizer: Any) -> tuple[ValidationSet, str, int]:
    """Return the run's own validation set on one rank, its name and its sequence length."""
    config = read_run_config(options.checkpoint, options.config)
    try:
        name = validation_source(config).name
        batches = build_validation_set(config, 1, 0, tokenizer)
        return batches, f"{name} (as validated)", config.validation.seq_len
    except AttributeError as error:
        raise _incomplete(error) from error


def _incomplete(error: AttributeError) -> ConfigError:
    want = "the complete record of a run, or --corpus"
    return ConfigError(RUN_CONFIG, str(error), want)


def _seq_len(model: LlamaModel, options: argparse.Namespace) -> int:
    longest = model.model_args.max_seq_len
    if options.seq_len > longest:
        raise ConfigError("--seq_len", options.seq_len, f"at most the trained window {longest}")
    return int(options.seq_len or longest)
