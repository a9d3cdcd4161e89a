# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train a byte-level BPE tokenizer on local files or on Python's standard library.

The shipped tokenizer was created with::

    torchtitan-lr tokenizer --corpus python_stdlib --vocab_size 4096 \
        --out torchtitan_lr/data/assets/bpe4k

The same text and the same version of ``tokenizers`` give the same files. To use the tokenizer, set
``model.hf_assets_path`` to the folder.
"""

import argparse
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
    parser.add_argument("--format", choices=["hf", "tiktoken"], default="hf", help="of the files")


def run(args: argparse.Namespace) -> int:
    """Train and write the tokenizer, and print its size; return the exit status."""
    from torchtitan_lr.data.llama3 import BOS, EOS, NUM_LLAMA3_SPECIALS
    from torchtitan_lr.data.sources import Source, texts
    from torchtitan_lr.data.train_tokenizer import make_folder, save_hf, save_tiktoken, train_bpe

    tiktoken = args.format == "tiktoken"
    make_folder(args.out, dry=True)  # check it before training, which may take minutes
    if (args.corpus == "local") != bool(args.path):
        want = "a file, folder or pattern with --corpus local, and no path without"
        raise ConfigError("--path", args.path, want)
    source = Source(args.corpus, (args.path,) if args.path else (), "--path")
    corpus = texts(source, held_out=False)
    # llama-3's 256 special tokens are not in a rank file, but count as vocabulary.
    room = args.vocab_size - (NUM_LLAMA3_SPECIALS if tiktoken else 0)
    tokenizer = train_bpe(corpus, room, [] if tiktoken else [BOS, EOS])
    make_folder(args.out)
    (save_tiktoken if tiktoken else save_hf)(tokenizer, args.out)
    print(f"{args.vocab_size} tokens ({args.format}) -> {args.out}")
    return 0
