# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Documents encoded together have the tokens that each has alone."""

import base64

import pytest

from torchtitan_lr.data.encoding import encode_documents, tokenizer_identity
from torchtitan_lr.data.tokenizer import TiktokenTokenizer
from torchtitan_lr.titan.base import HuggingFaceTokenizer

ASSETS = "torchtitan_lr/data/assets/bpe4k"
TEXTS = ["", "a", "two words\n", "ünïcödé 漢字 " * 50, "def f(x):\n    return x\n" * 300]


def tiktoken_file(folder):
    path = folder / "tokenizer.model"
    ranks = [bytes([i]) for i in range(256)] + [b"wo", b"ds", b"  ", b"re"]
    path.write_bytes(b"".join(base64.b64encode(r) + b" %d\n" % i for i, r in enumerate(ranks)))
    return path


def alone(tokenizer):
    return [tokenizer.encode(text, add_bos=True, add_eos=True) for text in TEXTS]


def together(tokenizer):
    return [tokens.tolist() for tokens in encode_documents(tokenizer, TEXTS)]


@pytest.mark.parametrize("add", ["both", "none", "itself"])
def test_hugging_face(add):
    tokenizer = HuggingFaceTokenizer(ASSETS)
    if add == "none":
        tokenizer.bos_id = tokenizer.eos_id = None
    if add == "itself":  # a tokenizer.json whose post-processor adds the begin token
        tokenizer.hf_adds_bos = True
    assert together(tokenizer) == alone(tokenizer)
    assert (together(tokenizer)[0] == []) == (add == "none")


def test_tiktoken(tmp_path):
    tokenizer = TiktokenTokenizer(tiktoken_file(tmp_path))
    assert together(tokenizer) == alone(tokenizer)


def test_identity_follows_all_that_determines_the_ids(tmp_path):
    first = tokenizer_identity(HuggingFaceTokenizer(ASSETS))
    assert first == tokenizer_identity(HuggingFaceTokenizer(ASSETS))
    other_end, more = HuggingFaceTokenizer(ASSETS), HuggingFaceTokenizer(ASSETS)
    other_end.eos_id = 7
    more.tokenizer.add_tokens(["return x"])
    tiktoken = TiktokenTokenizer(tiktoken_file(tmp_path))
    assert len({first, *map(tokenizer_identity, (other_end, more, tiktoken))}) == 4
