# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train a byte-level BPE tokenizer on text, or convert llama-3's tiktoken rank file.

The shipped tokenizer was created with::

    torchtitan-lr tokenizer --corpus python_stdlib --vocab_size 4096 \
        --out torchtitan_lr/data/assets/bpe4k

The same text and the same version of ``tokenizers`` give the same files. ``--ranks FILE`` converts
a rank file instead. To use the tokenizer, set ``model.hf_assets_path`` to the folder.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.checkpoints.folders import is_free, unfinished
from torchtitan_lr.commands.parser import OneLineParser, add_text_column
from torchtitan_lr.config.files import read_regular
from torchtitan_lr.errors import ConfigError, escaped

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

MAX_VOCAB = 1_000_000

SAMPLE_BYTES = 1 << 20
"""Of the first documents, of which the bytes per token are measured."""

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

# llama-3's split of text before BPE: contractions, words with one leading non-letter, numbers of up
# to three digits, punctuation, line ends, spaces.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3.1 has 256 special tokens: these positions have names, all others are reserved.
_NAMED_SPECIALS = {
    0: BOS,
    1: EOS,
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}


def add_arguments(parser: OneLineParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--corpus",
        choices=["cpython", "python_stdlib", "local"],
        help="the text (default cpython)",
    )
    parser.add_argument("--path", help="file, folder or pattern of .txt, .jsonl or .parquet")
    add_text_column(parser)
    parser.add_argument("--ranks", type=Path, help="tiktoken rank file to convert; needs no text")
    parser.add_argument("--vocab_size", type=int, help="special tokens included (default 4096)")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder")


def run(args: argparse.Namespace) -> int:
    """Train or convert and write the tokenizer, and print its size; return the exit status."""
    from torchtitan_lr.data.pairs import text_of
    from torchtitan_lr.data.sources import Reader, Source
    from torchtitan_lr.data.tokenizer import HF_FILE, TOKENIZER_CONFIG

    _check_out(args.out)  # training may take minutes
    for name in ("corpus", "path", "vocab_size"):
        if args.ranks is not None and (value := getattr(args, name)) is not None:
            raise ConfigError(f"--{name}", value, "no such option with --ranks")
    corpus = args.corpus or "cpython"
    if (corpus == "local") != bool(args.path) and args.ranks is None:
        want = "a file, folder or pattern with --corpus local, and no path without"
        raise ConfigError("--path", args.path, want)
    config: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if args.ranks is not None:
        tokenizer = read_ranks(args.ranks)
        config["split_special_tokens"] = True
    else:
        reader = Reader(
            Source(corpus, (args.path,) if args.path else (), "--path", column=args.text_column)
        )
        texts = reader.texts(held_out=False)
        vocab_size = 4096 if args.vocab_size is None else args.vocab_size
        corpus_read = Sampled(map(text_of, texts) if reader.pairs else texts)
        tokenizer = train_bpe(corpus_read, vocab_size)
    with unfinished(args.out) as aside:
        (aside / HF_FILE).write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
        (aside / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    said = f"{tokenizer.get_vocab_size()} tokens -> {args.out}"
    if args.ranks is None:
        said += f"; {corpus_read.documents:,} documents, {corpus_read.bytes:,} bytes, "
        said += f"{corpus_read.bytes_per_token(tokenizer):.2f} bytes per token"
    print(escaped(said))
    return 0


class Sampled:
    """Documents that are counted as they are read, with the first ones to measure a tokenizer on.

    ``documents`` and ``bytes`` are those read so far, in UTF-8.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts, self._first, self._kept = texts, list[str](), 0
        self.documents = self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            size = len(text.encode("utf-8", errors="replace"))
            self.documents, self.bytes = self.documents + 1, self.bytes + size
            if self._kept < SAMPLE_BYTES:
                self._first.append(text)
                self._kept += size
            yield text

    def bytes_per_token(self, tokenizer: "Tokenizer") -> float:
        """Return the bytes of the first `SAMPLE_BYTES` over their tokens, BOS and EOS left out."""
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(self._first))
        return self._kept / max(1, tokens)


def train_bpe(corpus: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE tokenizer with llama-3's pre-tokenization.

    The ids are BOS (0), EOS (1), the 256 bytes, and merges.

    Raises:
        ConfigError: The vocabulary is too small for the bytes or is enormous, or the text has too
            little variety.
    """
    from tokenizers import models, pre_tokenizers, trainers

    from torchtitan_lr.console.progress import progress

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 3
    if not smallest <= vocab_size <= MAX_VOCAB:
        bound = f"at least {smallest}" if vocab_size < smallest else f"at most {MAX_VOCAB}"
        raise ConfigError("--vocab_size", vocab_size, bound)
    tokenizer = _byte_level(models.BPE())
    # All 256 bytes, seen or not, so that any text can be encoded.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    documents = progress(corpus, "reading the corpus", unit="documents")
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        most = f"at most {tokenizer.get_vocab_size()} with so little text"
        raise ConfigError("--vocab_size", vocab_size, most)
    return tokenizer


def read_ranks(path: Path) -> "Tokenizer":
    """Read llama-3's rank file, a base64 token and its rank on each line, as a tokenizer.

    The ids are those of tiktoken with llama-3's split and its 256 special tokens behind the ranks:
    every pair of tokens that makes a third one is a merge, in the order of the third one's rank.

    Raises:
        ConfigError: It is not a rank file (SentencePiece models have the same name).
    """
    from tiktoken.load import load_tiktoken_bpe
    from tokenizers import AddedToken, models

    try:
        # With the file's hash, tiktoken does not take its copy of an earlier version.
        ranks = load_tiktoken_bpe(str(path), hashlib.sha256(read_regular(path)).hexdigest())
    except (OSError, ValueError):
        ranks = {}
    covers_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or not covers_bytes:
        want = "a tiktoken rank file (base64 token and rank per line)"
        raise ConfigError("--ranks", str(path), want)
    # The characters of bytes in a byte-level vocabulary: printable Latin-1 stays as it is.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    vocab = {}
    for token, rank in ranks.items():
        vocab["".join(chars[byte] for byte in token)] = rank
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in vocab and b in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    # If a whole piece is a token, tiktoken takes that token, whatever the merges would make.
    tokenizer = _byte_level(models.BPE(vocab, merges, ignore_merges=True))
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    names = [_NAMED_SPECIALS.get(i) or next(reserved) for i in range(256)]
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    return tokenizer


def _byte_level(model: "models.BPE") -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _check_out(out: Path) -> None:
    """Raise if the output folder holds something, cannot be created or is not writable."""
    try:
        nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
        usable = usable and is_free(out)
    except OSError:
        usable = False
    if not usable:
        raise ConfigError("--out", str(out), "a folder that is empty, or new and can be made")
