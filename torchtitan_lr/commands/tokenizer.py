# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train a byte-level BPE tokenizer on text, or convert llama-3's tiktoken rank file.

The shipped tokenizer was created with::

    torchtitan-lr tokenizer --corpus python_stdlib --vocab_size 4096 \
        --out torchtitan_lr/data/assets/bpe4k

The same text and the same version of ``tokenizers`` give the same files. ``--ranks FILE`` converts
a rank file instead. To use the tokenizer, set ``model.hf_assets_path`` to the folder.
"""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.checkpoints.folders import unfinished
from torchtitan_lr.commands.parser import OneLineParser, check_out
from torchtitan_lr.config.files import read_regular
from torchtitan_lr.errors import ConfigError, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

# llama-3's split of text before BPE: contractions, words with one leading non-letter, numbers of up
# to three digits, punctuation, line ends, spaces.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3.1 has 256 special tokens: these positions have names, all others are reserved.
_NAMED_SPECIALS = {0: BOS, 1: EOS, 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>"}
_NAMED_SPECIALS |= {7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"}


def add_arguments(parser: OneLineParser) -> None:
    """Add the options."""
    corpora = ["cpython", "python_stdlib", "local"]
    parser.add_argument("--corpus", choices=corpora, default="cpython", help="the text")
    parser.add_argument("--path", help="file, folder or pattern of .txt, .jsonl or .parquet")
    parser.add_shared("--text_column")
    parser.add_argument("--ranks", type=Path, help="tiktoken rank file to convert; needs no text")
    parser.add_argument("--vocab_size", type=int, default=4096, help="special tokens included")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder")


def run(args: argparse.Namespace) -> int:
    """Train or convert and write the tokenizer, and print its size; return the exit status."""
    check_out(args.out, "--out")
    want = "a file, folder or pattern with --corpus local, and no path without"
    require((args.corpus == "local") == bool(args.path), "--path", args.path, want)
    from torchtitan_lr.data.pairs import text_of
    from torchtitan_lr.data.sources import Reader, Source
    from torchtitan_lr.data.tokenizer import HF_FILE, TOKENIZER_CONFIG

    config: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    with unfinished(args.out) as aside:
        if args.ranks is not None:
            tokenizer = read_ranks(args.ranks)
            config["split_special_tokens"] = True
        else:
            paths = (args.path,) if args.path else ()
            reader = Reader(Source(args.corpus, paths, "--path", column=args.text_column))
            texts = reader.texts(held_out=False)
            tokenizer = train_bpe(map(text_of, texts) if reader.pairs else texts, args.vocab_size)
        (aside / HF_FILE).write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
        (aside / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens -> {args.out}")
    return 0


def train_bpe(corpus: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE tokenizer with llama-3's pre-tokenization.

    The ids are BOS (0), EOS (1), the 256 bytes, and merges.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from torchtitan_lr.console.terminal import progress

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + 3
    require(vocab_size >= least, "--vocab_size", vocab_size, f"at least {least}")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    # All 256 bytes, seen or not, so that any text can be encoded.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    documents = progress(corpus, "reading the corpus", unit="documents")
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def read_ranks(path: Path) -> "Tokenizer":
    """Read llama-3's rank file, a base64 token and its rank on each line, as a tokenizer.

    The ids are those of tiktoken with llama-3's split and its 256 special tokens behind the ranks.
    """
    from tokenizers import pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    names = [_NAMED_SPECIALS.get(i) or next(reserved) for i in range(256)]
    want = "a tiktoken rank file (base64 token and rank per line)"
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # it may have an earlier content of the file
    try:
        read_regular(path)  # a pipe would wait for ever
        tokenizer = TikTokenConverter(str(path), LLAMA3_SPLIT, False, names).converted()
    except (OSError, ValueError) as error:  # SentencePiece models have the same name
        raise ConfigError("--ranks", str(path), want) from error
    ids = tokenizer.get_vocab(with_added_tokens=False)
    is_whole = sorted(ids.values()) == list(range(len(ids)))
    has_bytes = {*pre_tokenizers.ByteLevel.alphabet()} <= ids.keys()
    require(is_whole and has_bytes, "--ranks", str(path), want)
    return tokenizer
