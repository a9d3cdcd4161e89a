#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Evaluate a checkpoint or an export: loss, perplexity and bits per byte of a text.

By default the text is the validation corpus of the run:

    python scripts/evaluate.py outputs/checkpoint/step-100
    python scripts/evaluate.py outputs/checkpoint/step-100 --corpus local --path 'books/*.txt'

Several ranks share the text under torchrun, in the run's layout or another one:

    torchrun --nproc_per_node=4 scripts/evaluate.py outputs/checkpoint/step-100 \
        --parallelism.tensor_parallel_degree=2

Every token of the documents, BOS and EOS included, is predicted once, from at most --seq_len tokens
before it. The loss is the mean over all of them. Bits per byte is the loss of all tokens, divided
by the bytes of the text in UTF-8; it compares models with different tokenizers.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.processes import end_with_torchrun, exit_without_teardown
from torchtitan_lr.tools.cli import OneLineParser, in_one_line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        The options by name.
    """
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a step's folder, or an export's"
    )
    parser.add_argument(
        "--corpus",
        choices=["python_stdlib", "local", "c4", "c4_validation"],
        help="the text; local: all documents, python_stdlib: the held-out part, c4: the validation "
        "split, streamed; default: the run's validation corpus",
    )
    parser.add_argument(
        "--path",
        help="file, folder or pattern of .txt, .jsonl or .parquet; with c4 a local copy",
    )
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
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, documents=0, seq_len=0, batch_size=1)
    check_corpus(options)
    return options


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
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError("--out", str(out), "a file in a folder that exists")


def as_text(result: dict[str, Any]) -> str:
    """Format the results, one per line.

    Args:
        result: What `torchtitan_lr.tools.evaluate.evaluate` returned.
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
    return "\n".join(f"{name:<15}{value}" for name, value in lines.items())


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_args(argv)
    # Imported late: torchtitan takes seconds, and --help and argument errors do not need it.
    from torchtitan_lr.tools.evaluate import evaluate

    result = evaluate(options)
    if os.environ.get("RANK", "0") != "0":
        return 0
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2) if options.json else as_text(result))
    return 0


if __name__ == "__main__":
    end_with_torchrun()
    exit_without_teardown(main())
