# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train a byte-level BPE tokenizer on local files or on Python's standard library.

The shipped tokenizer was created with::

    torchtitan-lr tokenizer --corpus python_stdlib --vocab_size 4096 \
        --out torchtitan_lr/data/assets/bpe4k

The same text and the same version of ``tokenizers`` give the same files. To use the tokenizer, set
``model.hf_assets_path`` to the folder.
"""

import argparse
import os
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.errors import ConfigError


def add_arguments(parser: OneLineParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--corpus",
        choices=["cpython", "python_stdlib", "local"],
        default="cpython",
        help="the text",
    )
    parser.add_argument("--path", help="file, folder or pattern of .txt, .jsonl or .parquet")
    parser.add_argument("--vocab_size", type=int, default=4096, help="special tokens included")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")


def run(args: argparse.Namespace) -> int:
    """Train and write the tokenizer, and print its size; return the exit status."""
    from torchtitan_lr.data.bpe import save_hf, train_bpe
    from torchtitan_lr.data.sources import Source, texts

    _check_out(args.out)  # training may take minutes
    if (args.corpus == "local") != bool(args.path):
        want = "a file, folder or pattern with --corpus local, and no path without"
        raise ConfigError("--path", args.path, want)
    source = Source(args.corpus, (args.path,) if args.path else (), "--path")
    tokenizer = train_bpe(texts(source, held_out=False), args.vocab_size)
    args.out.mkdir(parents=True, exist_ok=True)
    save_hf(tokenizer, args.out)
    print(f"{args.vocab_size} tokens -> {args.out}")
    return 0


def _check_out(out: Path) -> None:
    """Raise if the output folder cannot be created or is not writable."""
    try:
        nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        raise ConfigError("--out", str(out), "a folder to write into, or one that can be made")
