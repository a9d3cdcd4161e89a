# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train a byte-level BPE tokenizer on a corpus and write it in one of two formats."""

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lr.console.progress import progress
from torchtitan_lr.data.llama3 import BOS, EOS, HF_FILE, LLAMA3_SPLIT, TIKTOKEN_FILE
from torchtitan_lr.errors import ConfigError

NUM_BYTES = 256
MAX_VOCAB = 1_000_000


def train_bpe(corpus: Iterable[str], vocab_size: int, specials: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with llama-3's pre-tokenization.

    Args:
        corpus: The text.
        vocab_size: Total number of ids: specials, the 256 bytes, and merges.
        specials: Special tokens, which get the first ids.

    Raises:
        ConfigError: The vocabulary is too small for the bytes or is enormous, or the text has too
            little variety.
    """
    smallest = NUM_BYTES + len(specials) + 1
    if vocab_size < smallest:
        raise ConfigError("--vocab_size", vocab_size, f"at least {smallest}")
    if vocab_size > MAX_VOCAB:
        raise ConfigError("--vocab_size", vocab_size, f"at most {MAX_VOCAB}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        # All 256 bytes, seen or not, so that any text can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = progress(corpus, "reading the corpus", unit="documents")
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            "--vocab_size", vocab_size, f"at most {tokenizer.get_vocab_size()} with so little text"
        )
    return tokenizer


def save_hf(tokenizer: Tokenizer, out: Path) -> None:
    """Write ``tokenizer.json`` and the ``tokenizer_config.json`` that names its special tokens.

    Args:
        tokenizer: Returned by :func:`train_bpe` with both special tokens.
        out: An existing folder.
    """
    tokenizer.save(str(out / HF_FILE), pretty=False)
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_tiktoken(tokenizer: Tokenizer, out: Path) -> None:
    """Write ``tokenizer.model``, llama-3's format: a base64 token and its rank on each line.

    Args:
        tokenizer: Returned by :func:`train_bpe` without special tokens.
        out: An existing folder.
    """
    byte_of = {char: byte for byte, char in byte_alphabet().items()}
    by_rank = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    lines = (
        f"{base64.b64encode(bytes(byte_of[char] for char in token)).decode()} {rank}\n"
        for token, rank in by_rank
    )
    (out / TIKTOKEN_FILE).write_text("".join(lines))


def byte_alphabet() -> dict[int, str]:
    """Return the character of each byte in a byte-level BPE vocabulary.

    Printable Latin-1 characters map to themselves, the other bytes to characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    mapped = {byte: chr(byte) for byte in printable}
    return mapped | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}


def make_folder(out: Path, dry: bool = False) -> None:
    """Create the output folder.

    Args:
        out: The folder.
        dry: Only check that it can be created.

    Raises:
        ConfigError: It cannot be created or is not writable.
    """
    try:
        if not dry:
            out.mkdir(parents=True, exist_ok=True)
        nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        raise ConfigError("--out", str(out), "a folder to write into, or one that can be made")
