# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Evaluate a checkpoint or an export on a corpus: loss, perplexity and bits per byte."""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from torchtitan_lr.console.progress import progress
from torchtitan_lr.data.corpus import Corpus, ValidationSet, moved
from torchtitan_lr.data.prepare import C4_NAME, ensure_prepared, find_prepared, open_rows
from torchtitan_lr.data.sources import Source, data_path
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.hf.exported import is_export
from torchtitan_lr.hf.loading import (
    build_model_args,
    load_for_inference,
    load_tokenizer,
    read_job_config,
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
from torchtitan_lr.hf.text import Document, EvaluationSet, encoded, prepared
from torchtitan_lr.launch.environment import launched_ranks
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training.history import perplexity


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
    return (_on_ranks if ranks else _alone)(options)


Batches = EvaluationSet | ValidationSet


def _alone(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate in this process, without a process group."""
    source = _source(options)
    config = None
    if source is None:
        config = read_job_config(options.checkpoint, options.config)
    model, tokenizer = load_for_inference(options.checkpoint, options.config, options.device)
    seq_len = options.seq_len or model.model_args.max_seq_len
    if config is not None and options.as_validated:
        _check_validated(config)
        seq_len = config.validation.seq_len
    else:
        check_window(options.seq_len, model.model_args.max_seq_len)
    batches, corpus = _batches(options, source, config, tokenizer, seq_len)
    about = {"checkpoint": str(options.checkpoint), "corpus": corpus, "seq_len": seq_len}
    return about | _result(batches, corpus, lambda: total_loss(model, batches)) | {"ranks": 1}


def _on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate on all ranks of torchrun; what can be refused is refused before they connect."""
    source = _source(options)
    device_type = bind_device()
    if options.device not in ("", device_type):
        want = f"{device_type} under torchrun, or nothing"
        raise ConfigError("--device", options.device, want)
    ranks = launched_ranks("default")
    length = None if options.as_validated else options.seq_len
    model = options.checkpoint, options.config, options.overrides
    config = build_config(*model, ranks, device_type, length)
    if options.as_validated:
        _check_validated(config)
    tokenizer = load_tokenizer(config, build_model_args(config))
    if source is not None:
        next(encoded(source, tokenizer), None)
    local = "" if device_type == "cpu" else f":{os.environ['LOCAL_RANK']}"
    device = torch.device(f"{device_type}{local}")
    if device_type != "cpu":
        getattr(torch, device_type).set_device(device)

    parallel_dims = start_group(config)
    total_loss_of = load_on_ranks(options.checkpoint, config, parallel_dims, device)
    seq_len, share = config.validation.seq_len, data_share(parallel_dims)
    batches, name = _batches(options, source, config, tokenizer, seq_len, share)
    about = {"checkpoint": str(options.checkpoint), "corpus": name, "seq_len": seq_len}
    result = _result(batches, name, lambda: total_loss_of(batches))
    return about | result | {"ranks": ranks}


def _check_validated(config: Any) -> None:
    """Refuse a run's validation that its model has no rotary positions for."""
    given, most = config.validation.seq_len, config.training.seq_len
    want = f"at most training.seq_len ({most}); evaluate without --as_validated uses that"
    require(given <= most, "validation.seq_len", given, want)


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
    device, num_tokens = model.freqs_cis.device, 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    total = len(batches) if isinstance(batches, ValidationSet) else None
    for batch in progress(batches, "evaluation", total):
        tokens, labels, arguments = moved(batch, device)
        loss_sum += model(tokens, targets=labels, **arguments)
        num_tokens += int((labels != IGNORE_INDEX).sum())
    return float(loss_sum), num_tokens


def _source(options: argparse.Namespace) -> Source | None:
    """Return the corpus of the command line; None for the run's validation corpus."""
    name, path = options.corpus, options.path
    if name is None:
        if is_export(options.checkpoint) and options.config is None:
            want = "a corpus: an export has no record of its data"
            raise ConfigError("--corpus", name, want)
        read_job_config(options.checkpoint, options.config)  # raises where it names no corpus
        return None
    if name == "local":
        return Source(name, (path,), "--path", "held_out", options.text_column)
    if not name.startswith("c4"):
        return Source(name, (), "--corpus")
    if path and path[0] in "/.~" and not data_path(path, "--path").exists():
        raise ConfigError("--path", path, "a local copy of c4 that exists")
    where = "--path" if path else "--corpus"
    return Source("hf", (path or C4_NAME,), where, "held_out", config="en", split="validation")


def _batches(
    options: argparse.Namespace,
    source: Source | None,
    config: Any,
    tokenizer: Any,
    seq_len: int,
    share: tuple[int, int] = (1, 0),
) -> tuple[Batches, str]:
    """Return this rank's share of the text, and its name.

    Args:
        options: The options of the command line.
        source: The corpus that the command line names; None for the run's validation corpus.
        config: The run's configuration; may be None with a corpus.
        tokenizer: Encodes the documents.
        seq_len: Tokens per window.
        share: Number of data-parallel ranks, and the number of this rank among them.
    """
    masked = config is not None and config.training.mask_documents
    folders = None
    if source is None and options.config is None:
        folders = find_prepared(config, "validation")
    if source is not None:
        if config is None and (options.config is not None or not is_export(options.checkpoint)):
            record = read_run_config(options.checkpoint, options.config)
            masked = getattr(record.training, "mask_documents", False)
        name = f"{options.corpus} (all)" if options.corpus == "local" else options.corpus
        documents: Callable[[], Iterator[Document]] = partial(encoded, source, tokenizer)
    elif options.as_validated:
        rows = open_rows(config, "validation", folders)
        section = config.validation
        held_out = ValidationSet(rows, section.local_batch_size, *share, section.steps)
        return held_out, f"{' + '.join(part.name for part in rows)} (as validated)"
    else:
        parts = ensure_prepared(config, "validation", folders=folders)
        corpora = [Corpus.open(part.folder) for part in parts]
        name = f"{' + '.join(part.name for part in parts)} (held out)"
        documents = partial(prepared, corpora, tokenizer)

    def first() -> Iterator[Document]:
        return islice(documents(), options.documents or None)

    sizes = seq_len, options.batch_size
    return EvaluationSet(first, tokenizer.decode, *sizes, *share, masked), name
