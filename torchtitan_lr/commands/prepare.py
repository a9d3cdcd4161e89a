# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Write the tokens of text into a folder that training reads.

    torchtitan-lr prepare 'data/*.jsonl.gz' --tokenizer my_tokenizer --out tokens
    torchtitan-lr prepare hf:allenai/c4@1588ec4 --hf_name en --tokens 1e9 \
        --tokenizer my_tokenizer --out tokens
    torchtitan-lr train --training.dataset=prepared --training.dataset_path=tokens

A source is a file, folder or pattern of .txt, .jsonl (also .gz, .zst, .bz2 and .xz) or .parquet;
cpython, python_stdlib or python_stdlib_docs; or a dataset of the Hugging Face Hub. The folder has
Megatron's indexed format; it must be new, empty or this command's own. The same command goes on
with what a killed one has left. `train` prepares its dataset by itself: this command is for corpora
that several machines share, or that are prepared elsewhere.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lr.commands.parser import OneLineParser, check_at_least
from torchtitan_lr.errors import escaped, require

if TYPE_CHECKING:
    from torchtitan_lr.data.corpus import Corpus
    from torchtitan_lr.data.sources import Source


def add_arguments(parser: OneLineParser) -> None:
    """Add the options."""
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="what to read, in order")
    parser.add_argument("--tokenizer", default="", help="folder of a tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    least = "of each source at least; it ends with the piece of text that reaches them"
    parser.add_argument("--tokens", type=float, help=least)
    parser.add_argument("--max_bad_records", type=int, default=0, help="records that may be lost")
    parser.add_shared("--text_column")
    parser.add_argument("--hf_name", help="the dataset's configuration, such as en")
    parser.add_argument("--hf_split", default="train", help="the dataset's split")
    verify = "read all of a prepared folder, and check it"
    parser.add_argument("--verify", action="store_true", help=verify)


def run(args: argparse.Namespace) -> int:
    """Prepare or verify a folder, and print its size; return the exit status."""
    from torchtitan_lr.data.corpus import Corpus
    from torchtitan_lr.data.prepare import described

    if args.verify:
        corpus = Corpus.open(args.out, "--out")
        corpus.check(math.inf)
    else:
        corpus = _prepare(args)
        for bad in corpus.record["bad_records"]:
            print(escaped(f"left out {bad}"))
    train, held_out = corpus.tokens(), corpus.tokens(held_out=True)
    print(escaped(described(args.out.name, corpus)))
    print(f"{train:,} tokens to train on, {held_out:,} held out -> {args.out}")
    return 0


def _prepare(args: argparse.Namespace) -> "Corpus":
    from torchtitan_lr.data.sources import Reader
    from torchtitan_lr.data.tokenize import prepare_folder
    from torchtitan_lr.data.tokenizer import build_tokenizer

    want = "a file, folder or pattern, python_stdlib or hf:owner/name"
    require(args.sources, "SOURCE", "", want)
    require(args.tokenizer, "--tokenizer", "", "a folder, such as my_tokenizer")
    fits = args.tokens is None or 1 <= args.tokens < 2**63
    require(fits, "--tokens", args.tokens, "a positive number such as 1e9")
    check_at_least(args, max_bad_records=0)
    tokenizer = build_tokenizer(args.tokenizer)
    readers = [Reader(source) for source in _sources(args)]
    return prepare_folder(readers, tokenizer, args.out, "--out", args.max_bad_records)


def _sources(args: argparse.Namespace) -> "list[Source]":
    """Return the sources in order; neighbouring files are one source, with one held-out part."""
    from torchtitan_lr.data.sources import LIBRARIES, Source

    found: list[Source] = []
    tokens = None if args.tokens is None else int(args.tokens)
    local = Source("local", (), "SOURCE", column=args.text_column, tokens=tokens)
    for given in args.sources:
        if given in LIBRARIES:
            found.append(Source(given, (), "SOURCE", tokens=tokens))
        elif given.startswith("hf:"):
            name = given.removeprefix("hf:")
            require(name, "SOURCE", given, "the name of a dataset, such as hf:owner/name")
            source = replace(local, name="hf", paths=(name,))
            found.append(replace(source, config=args.hf_name, split=args.hf_split))
        elif found and found[-1].name == "local":
            found[-1] = replace(found[-1], paths=(*found[-1].paths, given))
        else:
            found.append(replace(local, paths=(given,)))
    return found
