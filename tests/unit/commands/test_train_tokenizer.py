# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tokenizer script: the size asked for, what is refused."""

import pytest

from tests.commands import Command
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.titan.base import JobConfig

WORDS = "the low rank model reads what it is given, and writes what it has read; "


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    words = WORDS.split()
    lines = (" ".join(words[(i * k) % len(words)] + str(i) for k in range(9)) for i in range(800))
    path.write_text("\n".join(lines) + "\n    indented caf\u00e9\n")
    return path


def train(text, out, *more):
    return Command("tokenizer").main(
        ["--corpus", "local", "--path", str(text), "--out", str(out), *more]
    )


def load(folder):
    job = JobConfig()
    job.model.hf_assets_path = str(folder)
    return build_tokenizer(job)


def test_size_special_tokens_and_round_trip(text, tmp_path):
    assert train(text, tmp_path / "hf", "--vocab_size", "700") == 0
    tokenizer = load(tmp_path / "hf")
    assert tokenizer.get_vocab_size() == 700
    assert tokenizer.id_to_token(tokenizer.bos_id) == "<|begin_of_text|>"
    assert tokenizer.id_to_token(tokenizer.eos_id) == "<|end_of_text|>"
    unseen = "\x00\x7f never seen: \u4e00 \U0001f680\r\n"
    assert tokenizer.decode(tokenizer.encode(unseen)) == unseen
    trained = len(tokenizer.encode(WORDS, add_bos=False, add_eos=False))
    assert trained < len(WORDS) / 2  # negative control: bytes alone would give len(WORDS)


@pytest.mark.parametrize(
    ("size", "part"), [("200", "at least 259"), ("60000", "at most"), ("9" * 9, "at most 1000000")]
)
def test_sizes_that_cannot_be(text, tmp_path, capsys, size, part):
    assert train(text, tmp_path / "out", "--vocab_size", size) == 2
    message = capsys.readouterr().err
    assert f"--vocab_size: got {size}, expected {part}" in message
    assert message.count("\n") == 1 and not (tmp_path / "out").exists()


def test_wrong_arguments_are_told_in_one_line(text, tmp_path, capsys):
    with pytest.raises(SystemExit) as info:
        train(text, tmp_path / "out", "--vocab_size", "many")
    assert info.value.code == 2
    message = capsys.readouterr().err
    assert "--vocab_size" in message and message.count("\n") == 1
