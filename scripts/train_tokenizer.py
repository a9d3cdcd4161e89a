#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train a byte-level BPE tokenizer on local files or on the Python standard library.

The shipped tokenizer was created with::

    python scripts/train_tokenizer.py --corpus python_stdlib --vocab_size 4096 \
        --out torchtitan_lr/data/assets/bpe4k

The same text and the same version of ``tokenizers`` give the same files. To use the tokenizer, set
``model.hf_assets_path`` to the folder.
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.data.corpora import build_corpus
from torchtitan_lr.data.llama3 import BOS, EOS, NUM_LLAMA3_SPECIALS
from torchtitan_lr.data.train_tokenizer import make_folder, save_hf, save_tiktoken, train_bpe


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        ``corpus``, ``path``, ``vocab_size``, ``out`` and ``format``.
    """
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--corpus", choices=["python_stdlib", "local"], default="python_stdlib", help="the text"
    )
    parser.add_argument("--path", help="file, folder or pattern of .txt, .jsonl or .parquet")
    parser.add_argument("--vocab_size", type=int, default=4096, help="special tokens included")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--format", choices=["hf", "tiktoken"], default="hf", help="of the files")
    return parser.parse_args(argv)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Train and write the tokenizer, and print its size; return the exit status."""
    args = parse_args(argv)
    tiktoken = args.format == "tiktoken"
    make_folder(args.out, dry=True)  # check it before training, which may take minutes
    corpus = build_corpus(args.corpus, args.path, "train", "training")
    # llama-3's 256 special tokens are not in a rank file, but count as vocabulary.
    room = args.vocab_size - (NUM_LLAMA3_SPECIALS if tiktoken else 0)
    tokenizer = train_bpe(corpus, room, [] if tiktoken else [BOS, EOS])
    make_folder(args.out)
    (save_tiktoken if tiktoken else save_hf)(tokenizer, args.out)
    print(f"{args.vocab_size} tokens ({args.format}) -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
