# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Evaluate a checkpoint or an export: loss, perplexity and bits per byte of a text.

By default the text is the validation corpus of the run:

    torchtitan-lr evaluate outputs/debug_cola
    torchtitan-lr evaluate outputs/debug_cola --corpus local --path 'books/*.txt'

Several ranks share the text under torchrun, in the run's layout or another one:

    torchrun --nproc_per_node=4 -m torchtitan_lr evaluate outputs/debug_cola \
        --parallelism.tensor_parallel_degree=2

Tasks of EleutherAI's lm-evaluation-harness run on an export of `--format hf`:

    lm_eval --model hf --model_args pretrained=for_hf,trust_remote_code=True --tasks hellaswag

Every token of the documents, BOS and EOS included, is predicted once, from at most --seq_len tokens
before it. The loss is the mean over all of them. Bits per byte is the loss of all tokens, divided
by the bytes of the text in UTF-8; it compares models with different tokenizers.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.commands.parser import (
    OneLineParser,
    add_allow_unverified,
    add_extension,
    add_text_column,
    check_at_least,
)
from torchtitan_lr.errors import ConfigError, escaped, require


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint and the options."""
    parser.takes_overrides = True
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a run's folder, a step's or an export's",
    )
    parser.add_argument(
        "--corpus",
        choices=["cpython", "python_stdlib", "python_stdlib_docs", "local", "c4", "c4_validation"],
        help="the text; local: all documents, cpython, python_stdlib: the held-out part, c4: the "
        "validation split, streamed; default: the run's validation corpus",
    )
    parser.add_argument(
        "--path",
        help="file, folder or pattern of .txt, .jsonl or .parquet; with c4 a local copy",
    )
    add_text_column(parser)
    parser.add_argument("--documents", type=int, default=0, help="at most; 0 reads all")
    parser.add_argument("--seq_len", type=int, default=0, help="0 is the trained window")
    parser.add_argument(
        "--batch_size", type=int, default=8, help="windows per pass and data-parallel rank"
    )
    parser.add_argument(
        "--as_validated",
        action="store_true",
        help="use the windows of the run's own validation, to repeat its number",
    )
    parser.add_argument("--device", default="", help="default: cuda where there is one, else cpu")
    parser.add_argument("--config", type=Path, help="the run's TOML; default: the run's own record")
    add_allow_unverified(parser)
    add_extension(parser)
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the results on rank 0; return the exit status."""
    from torchtitan_lr.launch.environment import forget_other_ranks
    from torchtitan_lr.launch.processes import begin_rank, exit_without_teardown

    begin_rank()
    forget_other_ranks()
    check_at_least(args, documents=0, seq_len=0, batch_size=1)
    check_corpus(args)
    from torchtitan_lr.config.build import import_extension
    from torchtitan_lr.hf.evaluate import evaluate
    from torchtitan_lr.hf.loading import find_step

    import_extension(args.custom_import)

    args.checkpoint = find_step(args.checkpoint, args.allow_unverified)
    result = evaluate(args)
    if os.environ.get("RANK", "0") == "0":
        # First, so that a full disk does not cost the result.
        print(json.dumps(result, indent=2) if args.json else as_text(result))
        if args.out is not None:
            write_whole(args.out.resolve(), json.dumps(result, indent=2) + "\n")
    if "RANK" in os.environ:
        exit_without_teardown(0)
    return 0


def check_corpus(options: argparse.Namespace) -> None:
    """Raise for options that do not fit together.

    Args:
        options: The options.

    Raises:
        ConfigError: An option has an invalid value.
    """
    if options.corpus == "local" and not options.path:
        want = "a file, folder or pattern of .txt, .jsonl or .parquet"
        raise ConfigError("--path", options.path, want)
    if options.corpus not in ("local", "c4", "c4_validation") and options.path:
        raise ConfigError("--path", options.path, "no path, or --corpus local")
    for name in ("corpus", "documents", "seq_len"):
        if options.as_validated and getattr(options, name):
            want = "no such option beside --as_validated"
            raise ConfigError(f"--{name}", getattr(options, name), want)
    out = options.out
    if out is not None:
        fits = out.is_file() if out.exists() else out.absolute().parent.is_dir()
        require(fits, "--out", str(out), "a file in a folder that exists")
        is_text = options.path and os.path.realpath(options.path) == os.path.realpath(out)
        require(not is_text, "--out", str(out), "another file than --path")


def as_text(result: dict[str, Any]) -> str:
    """Format the results, one per line.

    Args:
        result: What `torchtitan_lr.hf.evaluate.evaluate` returned.
    """
    lines = {"corpus": result["corpus"], "tokens": f"{result['tokens']:,}"}
    if result["bytes"] is not None:
        lines["documents"] = f"{result['documents']:,}, {result['bytes']:,} bytes"
    lines["loss"] = f"{result['loss']:.4f} nats/token"
    lines["perplexity"] = f"{result['perplexity']:.2f}"
    if result["bits_per_byte"] is not None:
        lines["bits per byte"] = f"{result['bits_per_byte']:.4f}"
    ranks = f" ({result['ranks']} ranks)" if result["ranks"] > 1 else ""
    lines["tokens/s"] = f"{result['tokens'] / result['seconds']:,.0f}{ranks}"
    return "\n".join(f"{name:<15}{escaped(value)}" for name, value in lines.items())
