# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.inference.text import TextStream
from torchtitan_lr.titan.base import JobConfig

TEXT = "    for café in naïve 🚀🚀:\n\n\treturn 一二三\n"


@pytest.fixture(scope="module")
def tokenizer():
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    return build_tokenizer(job)


def pieces(tokenizer, text, stops=()):
    stream = TextStream(tokenizer, tokenizer.encode("def main():\n", add_eos=False), stops)
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    return [stream.push(token) for token in ids], stream


def test_pieces_make_up_the_text(tokenizer):
    found, stream = pieces(tokenizer, TEXT)
    assert "".join(found) + stream.push(None) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    # The control: a character of several tokens is whole, though its tokens alone are not.
    alone = [tokenizer.decode([t]) for t in tokenizer.encode(TEXT, add_bos=False, add_eos=False)]
    assert any("\ufffd" in piece for piece in alone)
    assert found.count("") >= 4


def test_an_incomplete_character_is_given_out_at_the_end(tokenizer):
    ids = tokenizer.encode("a🚀", add_bos=False, add_eos=False)
    stream = TextStream(tokenizer, [], ())
    assert "".join(stream.push(token) for token in ids[:-1]) == "a"
    assert stream.push(None) == "\ufffd"


@pytest.mark.parametrize("stop", ["\n\n", "café", "🚀", "in na", "\treturn 一二"])
def test_text_ends_before_a_stop_string(tokenizer, stop):
    found, stream = pieces(tokenizer, TEXT, ["never", stop])
    assert stream.stopped
    assert "".join(found) == TEXT[: TEXT.index(stop)]
    assert stream.push(None) == ""


def test_a_prompt_does_not_hold_a_stop_string(tokenizer):
    """A stop string that begins in the prompt is none."""
    found, stream = pieces(tokenizer, "\nx", ["\n\n"])
    assert "".join(found) + stream.push(None) == "\nx" and not stream.stopped
