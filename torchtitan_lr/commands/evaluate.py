# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Evaluate a checkpoint or an export: loss, perplexity and bits per byte of a text.

By default it repeats the run's own validation; a corpus gives every token of its documents:

    torchtitan-lr evaluate outputs/debug_cola
    torchtitan-lr evaluate outputs/debug_cola --corpus local --path 'books/*.txt'

The corpus local has all documents of --path, c4 the validation split, streamed, others the held-out
part. Every token of the documents, BOS and EOS included, is predicted once, from at most --seq_len
tokens before it. The loss is the mean over all of them. Bits per byte is the loss of all tokens,
divided by the bytes of the text in UTF-8; it compares models with different tokenizers.
"""

import argparse
import json
import math
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torchtitan_lr.commands.parser import OneLineParser, check_at_least
from torchtitan_lr.console.terminal import named_values
from torchtitan_lr.errors import require

if TYPE_CHECKING:
    from torchtitan_lr.data.sources import Source


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint and the options."""
    parser.add_shared("checkpoint", "--device", "--experimental.custom_import", "--json")
    corpora = ["cpython", "python_stdlib", "python_stdlib_docs", "local", "c4"]
    parser.add_argument("--corpus", choices=corpora, help="default: the run's own validation")
    path = "of local: a file, folder or pattern of .txt, .jsonl or .parquet; of c4 a local copy"
    parser.add_argument("--path", help=path)
    parser.add_shared("--text_column")
    parser.add_argument("--documents", type=int, default=0, help="at most; 0 reads all")
    parser.add_argument("--seq_len", type=int, default=0, help="0 is the trained window")
    parser.add_argument("--batch_size", type=int, default=8, help="windows per pass")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the results; return the exit status."""
    check_at_least(args, documents=0, seq_len=0, batch_size=1)
    fits = bool(args.path) if args.corpus == "local" else not args.path or args.corpus == "c4"
    want = "a file, folder or pattern with --corpus local, and no path without"
    require(fits, "--path", args.path, want)
    for name in ("documents", "seq_len"):
        given = getattr(args, name)
        require(args.corpus or not given, f"--{name}", given, "a --corpus beside it")
    from torchtitan_lr.config.build import import_extension

    import_extension(args.custom_import)
    result = evaluate(args)
    print(json.dumps(result, indent=2) if args.json else named_values(result))
    return 0


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Load a model and evaluate it; return its loss in nats per token, and what was evaluated.

    ``bits_per_byte`` is None for the windows of validation, whose text is not whole.
    """
    from torchtitan_lr.data.corpus import ValidationSet
    from torchtitan_lr.data.prepare import find_prepared, open_rows
    from torchtitan_lr.hf.exported import read_any
    from torchtitan_lr.titan.device import keep_freed_memory
    from torchtitan_lr.training.evaluation import EvaluationSet, encoded, total_loss
    from torchtitan_lr.training.history import perplexity
    from torchtitan_lr.training.loading import as_model, find_device

    device = find_device(options.device)
    if device == "cpu":
        keep_freed_memory()
    args, weights, tokenizer, config = read_any(options.checkpoint)
    window, seq_len = args.max_seq_len, options.seq_len or args.max_seq_len
    require(seq_len <= window, "--seq_len", seq_len, f"at most the trained window {window}")
    batches: EvaluationSet | ValidationSet
    if (corpus := options.corpus) is not None:
        documents = partial(encoded, _source(options), tokenizer)
        batches = EvaluationSet(
            lambda: islice(documents(), options.documents or None),
            tokenizer.decode,
            seq_len,
            options.batch_size,
            config is not None and config.training.mask_documents,
        )
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
    result |= {"seq_len": seq_len, "tokens": num_tokens, "seconds": time.perf_counter() - started}
    result |= {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": None}
    if isinstance(batches, EvaluationSet):
        result |= {"documents": batches.num_documents, "bytes": batches.num_bytes}
        result["bits_per_byte"] = loss_sum / math.log(2) / batches.num_bytes
    return result


def _source(options: argparse.Namespace) -> "Source":
    """Return the corpus of the command line."""
    from torchtitan_lr.data.prepare import C4_NAME
    from torchtitan_lr.data.sources import Source

    name, path = options.corpus, options.path
    if name == "local":
        return Source(name, (path,), "--path", "held_out", options.text_column)
    if name != "c4":
        return Source(name, (), "--corpus")
    where = "--path" if path else "--corpus"
    return Source("hf", (path or C4_NAME,), where, "held_out", config="en", split="validation")
