# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Byte-level BPE tokenizers with llama-3's split: trained on text, or read from a rank file."""

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lr.console.progress import progress
from torchtitan_lr.errors import ConfigError

HF_FILE = "tokenizer.json"
TIKTOKEN_FILE = "tokenizer.model"

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"

# llama-3's split of text before BPE: contractions, words with one leading non-letter, numbers of up
# to three digits, punctuation, line ends, spaces.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The named ones of llama-3.1's 256 special tokens, by position; all others are reserved.
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

NUM_BYTES = 256
MAX_VOCAB = 1_000_000


def train_bpe(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with llama-3's pre-tokenization.

    Args:
        corpus: The text.
        vocab_size: Total number of ids: BOS (0), EOS (1), the 256 bytes, and merges.

    Raises:
        ConfigError: The vocabulary is too small for the bytes or is enormous, or the text has too
            little variety.
    """
    smallest = NUM_BYTES + 3
    if not smallest <= vocab_size <= MAX_VOCAB:
        bound = f"at least {smallest}" if vocab_size < smallest else f"at most {MAX_VOCAB}"
        raise ConfigError("--vocab_size", vocab_size, bound)
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        # All 256 bytes, seen or not, so that any text can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = progress(corpus, "reading the corpus", unit="documents")
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        most = f"at most {tokenizer.get_vocab_size()} with so little text"
        raise ConfigError("--vocab_size", vocab_size, most)
    return tokenizer


def read_ranks(path: Path) -> Tokenizer:
    """Read llama-3's rank file, a base64 token and its rank on each line, as a tokenizer.

    The ids are those of tiktoken with llama-3's split and its 256 special tokens behind the ranks:
    every pair of tokens that makes a third one is a merge, in the order of the third one's rank.

    Raises:
        ConfigError: It is not a rank file (SentencePiece models have the same name).
    """
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError, binascii.Error):
        ranks = {}
    covers_bytes = all(bytes([byte]) in ranks for byte in range(NUM_BYTES))
    if sorted(ranks.values()) != list(range(len(ranks))) or not covers_bytes:
        want = f"a tiktoken rank file (base64 token and rank per line), or a {HF_FILE} next to it"
        raise ConfigError("model.hf_assets_path", str(path), want)
    chars = byte_alphabet()
    vocab = {"".join(chars[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in vocab and b in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    # tiktoken takes a whole piece that is a token as it is, whatever merges would make of it.
    tokenizer = _byte_level(models.BPE(vocab, merges, ignore_merges=True))
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    names = [_NAMED_SPECIALS.get(i) or next(reserved) for i in range(256)]
    specials = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_hf(tokenizer: Tokenizer, out: Path) -> None:
    """Write ``tokenizer.json``, and ``tokenizer_config.json`` with the names of BOS and EOS."""
    tokenizer.save(str(out / HF_FILE), pretty=False)
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def byte_alphabet() -> dict[int, str]:
    """Return the character of each byte in a byte-level BPE vocabulary.

    Printable Latin-1 characters map to themselves, the other bytes to characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    mapped = {byte: chr(byte) for byte in printable}
    return mapped | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}
