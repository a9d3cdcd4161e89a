# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Evaluate a checkpoint or an export: loss, perplexity and bits per byte of a text.

By default it repeats the run's own validation; a corpus gives every token of its documents:

    torchtitan-lr evaluate outputs/debug_cola
    torchtitan-lr evaluate outputs/debug_cola --corpus local --path 'books/*.txt'

Tasks of EleutherAI's lm-evaluation-harness run on an export of `--format hf`:

    lm_eval --model hf --model_args pretrained=for_hf,trust_remote_code=True --tasks hellaswag

Every token of the documents, BOS and EOS included, is predicted once, from at most --seq_len tokens
before it. The loss is the mean over all of them. Bits per byte is the loss of all tokens, divided
by the bytes of the text in UTF-8; it compares models with different tokenizers.
"""

import argparse
import json
import math
import os
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.commands.parser import (
    OneLineParser,
    add_extension,
    add_text_column,
    check_at_least,
    refuse_torchrun,
)
from torchtitan_lr.errors import ConfigError, escaped, require

if TYPE_CHECKING:
    from torchtitan_lr.data.sources import Source


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint and the options."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a run's folder, a step's or an export's",
    )
    parser.add_argument(
        "--corpus",
        choices=["cpython", "python_stdlib", "python_stdlib_docs", "local", "c4"],
        help="the text; local: all documents, cpython, python_stdlib: the held-out part, c4: the "
        "validation split, streamed; default: the windows of the run's own validation",
    )
    parser.add_argument(
        "--path",
        help="file, folder or pattern of .txt, .jsonl or .parquet; with c4 a local copy",
    )
    add_text_column(parser)
    parser.add_argument("--documents", type=int, default=0, help="at most; 0 reads all")
    parser.add_argument("--seq_len", type=int, default=0, help="0 is the trained window")
    parser.add_argument("--batch_size", type=int, default=8, help="windows per pass")
    parser.add_argument("--device", default="", help="default: cuda where there is one, else cpu")
    add_extension(parser)
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the results; return the exit status."""
    refuse_torchrun()
    check_at_least(args, documents=0, seq_len=0, batch_size=1)
    check_corpus(args)
    from torchtitan_lr.config.build import import_extension

    import_extension(args.custom_import)
    result = evaluate(args)
    # First, so that a full disk does not cost the result.
    print(json.dumps(result, indent=2) if args.json else as_text(result))
    if args.out is not None:
        write_whole(args.out.resolve(), json.dumps(result, indent=2) + "\n")
    return 0


def check_corpus(options: argparse.Namespace) -> None:
    """Raise for options that do not fit together.

    Raises:
        ConfigError: An option has an invalid value.
    """
    if options.corpus == "local" and not options.path:
        want = "a file, folder or pattern of .txt, .jsonl or .parquet"
        raise ConfigError("--path", options.path, want)
    if options.corpus not in ("local", "c4") and options.path:
        raise ConfigError("--path", options.path, "no path, or --corpus local")
    for name in ("documents", "seq_len"):
        given = getattr(options, name)
        require(options.corpus or not given, f"--{name}", given, "a --corpus beside it")
    out = options.out
    if out is not None:
        fits = out.is_file() if out.exists() else out.absolute().parent.is_dir()
        require(fits, "--out", str(out), "a file in a folder that exists")
        is_text = options.path and os.path.realpath(options.path) == os.path.realpath(out)
        require(not is_text, "--out", str(out), "another file than --path")


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Load a model and evaluate it.

    Returns:
        The results by name: ``loss`` in nats per token, ``perplexity``, ``bits_per_byte`` (None
        for the windows of validation, whose text is not whole), ``tokens``, ``documents``,
        ``bytes``, ``seconds``, and what was evaluated.

    Raises:
        ConfigError: The model, corpus or device cannot be used, or there is no text.
    """
    from torchtitan_lr.data.corpus import ValidationSet
    from torchtitan_lr.data.prepare import find_prepared, open_rows
    from torchtitan_lr.hf.folders import read_any
    from torchtitan_lr.titan.device import keep_freed_memory
    from torchtitan_lr.training.evaluation import EvaluationSet, encoded, total_loss
    from torchtitan_lr.training.history import perplexity
    from torchtitan_lr.training.loading import as_model, find_device

    source, device = _source(options), find_device(options.device)
    if device == "cpu":
        keep_freed_memory()
    args, weights, tokenizer, config = read_any(options.checkpoint)
    window, seq_len = args.max_seq_len, options.seq_len
    require(seq_len <= window, "--seq_len", seq_len, f"at most the trained window {window}")
    batches: EvaluationSet | ValidationSet
    if source is not None:
        corpus, seq_len = options.corpus, seq_len or window
        masked = config is not None and config.training.mask_documents

        def documents() -> Any:
            return islice(encoded(source, tokenizer), options.documents or None)

        sizes = seq_len, options.batch_size
        batches = EvaluationSet(documents, tokenizer.decode, *sizes, masked)
    else:
        want = "a corpus: an export has no record of its data"
        require(config is not None, "--corpus", None, want)
        section, seq_len = config.validation, config.validation.seq_len
        want = f"at most training.seq_len ({window}); --corpus reads windows of that"
        require(seq_len <= window, "validation.seq_len", seq_len, want)
        rows = open_rows(config, "validation", find_prepared(config, "validation"))
        batches = ValidationSet(rows, section.local_batch_size, 1, 0, section.steps)
        corpus = f"{' + '.join(part.name for part in rows)} (as validated)"
    started = time.perf_counter()
    loss_sum, num_tokens = total_loss(as_model(args, weights).to(device), batches)
    require(num_tokens, "--corpus", corpus, "a corpus with text")
    loss = loss_sum / num_tokens
    result: dict[str, Any] = {"checkpoint": str(options.checkpoint), "corpus": corpus}
    result |= {"seq_len": seq_len, "documents": None, "bytes": None, "bits_per_byte": None}
    result |= {"tokens": num_tokens, "loss": loss, "perplexity": perplexity(loss)}
    result["seconds"] = time.perf_counter() - started
    if isinstance(batches, EvaluationSet):
        result |= {"documents": batches.num_documents, "bytes": batches.num_bytes}
        result["bits_per_byte"] = loss_sum / math.log(2) / batches.num_bytes
    return result


def _source(options: argparse.Namespace) -> "Source | None":
    """Return the corpus of the command line; None for the run's own validation."""
    from torchtitan_lr.data.prepare import C4_NAME
    from torchtitan_lr.data.sources import Source, data_path

    name, path = options.corpus, options.path
    if name is None:
        return None
    if name == "local":
        return Source(name, (path,), "--path", "held_out", options.text_column)
    if name != "c4":
        return Source(name, (), "--corpus")
    if path and path[0] in "/.~" and not data_path(path, "--path").exists():
        raise ConfigError("--path", path, "a local copy of c4 that exists")
    where = "--path" if path else "--corpus"
    return Source("hf", (path or C4_NAME,), where, "held_out", config="en", split="validation")


def as_text(result: dict[str, Any]) -> str:
    """Format the results of `evaluate`, one per line."""
    lines = {"corpus": result["corpus"], "tokens": f"{result['tokens']:,}"}
    if result["bytes"] is not None:
        lines["documents"] = f"{result['documents']:,}, {result['bytes']:,} bytes"
    lines["loss"] = f"{result['loss']:.4f} nats/token"
    lines["perplexity"] = f"{result['perplexity']:.2f}"
    if result["bits_per_byte"] is not None:
        lines["bits per byte"] = f"{result['bits_per_byte']:.4f}"
    lines["tokens/s"] = f"{result['tokens'] / result['seconds']:,.0f}"
    return "\n".join(f"{name:<15}{escaped(value)}" for name, value in lines.items())
