# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tokenizer script: the size asked for, rank files against tiktoken, what is refused."""

import base64
import json
import os

import pytest
import tiktoken
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.commands import Command
from torchtitan_lr.commands.tokenizer import LLAMA3_SPLIT
from torchtitan_lr.data.tokenizer import build_tokenizer, encode_documents
from torchtitan_lr.errors import ConfigError

WORDS = "the low rank model reads what it is given, and writes what it has read; "


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    words = WORDS.split()
    lines = (" ".join(words[(i * k) % len(words)] + str(i) for k in range(9)) for i in range(800))
    path.write_text("\n".join(lines) + "\n    indented caf\u00e9\n")
    return path


def train(text, out, *more):
    own = ["--corpus", "local", "--path", str(text), "--out", str(out)]
    return Command("tokenizer").main([*own, *more])


def test_size_special_tokens_and_round_trip(text, tmp_path):
    assert train(text, tmp_path / "hf", "--vocab_size", "700") == 0
    tokenizer = build_tokenizer(f"{tmp_path}/hf")
    assert len(tokenizer.get_vocab()) == 700
    assert tokenizer.tokenizer.id_to_token(tokenizer.bos_id) == "<|begin_of_text|>"
    assert tokenizer.tokenizer.id_to_token(tokenizer.eos_id) == "<|end_of_text|>"
    unseen = "\x00\x7f never seen: \u4e00 \U0001f680\r\n"
    assert tokenizer.decode(tokenizer.encode(unseen)) == unseen
    trained = len(tokenizer.encode(WORDS, add_bos=False, add_eos=False))
    assert trained < len(WORDS) / 2  # negative control: bytes alone would give len(WORDS)


def test_a_rank_file_has_the_ids_of_tiktoken(text, tmp_path):
    assert train(text, tmp_path / "trained", "--vocab_size", "602") == 0
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = json.loads((tmp_path / "trained/tokenizer.json").read_text())["model"]["vocab"]
    order = sorted(vocab, key=vocab.get)[2:]  # without the two special tokens
    ranks = {bytes(byte_of[char] for char in token): i for i, token in enumerate(order)}
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    convert = ["--ranks", str(tmp_path / "tokenizer.model"), "--out", str(tmp_path / "out")]
    assert Command("tokenizer").main(convert) == 0
    tokenizer = build_tokenizer(f"{tmp_path}/out")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (600, 601)
    # Llama 3.1's published ids, less its 128,000 ranks.
    places = {"reserved_special_token_0": 2, "start_header_id": 6, "eot_id": 9}
    for name, place in (places | {"python_tag": 10, "reserved_special_token_247": 255}).items():
        assert tokenizer.tokenizer.token_to_id(f"<|{name}|>") == 600 + place
    theirs = tiktoken.Encoding("x", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    # Names of special tokens in a text are text: no document can forge the end of one.
    forged = "a document <|end_of_text|> and <|eot_id|> more"
    for line in (WORDS, "caf\u00e9 \U0001f680\r\n  12345 it's", text.read_text(), forged):
        (ids,) = encode_documents(tokenizer, [line])
        assert ids.tolist() == [600, *theirs.encode(line, disallowed_special=()), 601]
        assert tokenizer.decode(ids.tolist()[1:-1]) == line


@pytest.mark.timeout(60)
def test_what_is_no_rank_file(tmp_path, capsys):
    contents = [b"no base64 here\n", b"\x0a\x0e\x0a\x05<unk>\x15", b"YQ== 0\nYg== 2\n"]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    for source in ("0", "1", "2", "pipe", "/dev/zero"):
        options = ["--ranks", str(tmp_path / source), "--out", str(tmp_path / "out")]
        assert Command("tokenizer").main(options) == 2
        assert "expected a tiktoken rank file" in capsys.readouterr().err
    (tmp_path / "0").rename(tmp_path / "tokenizer.model")
    with pytest.raises(ConfigError, match="tokenizer --ranks converts"):
        build_tokenizer(str(tmp_path))
