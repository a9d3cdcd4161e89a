# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats: which tokens are labels, which records and templates are refused."""

import re
import shutil

import pytest

from tests.commands import ROOT
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.tokenizer import Tokenizer
from torchtitan_lr.errors import ConfigError

ASSETS = ROOT / "torchtitan_lr/data/assets/bpe4k"
PLAIN = Tokenizer(str(ASSETS))
CHAT = [("system", "Be brief. "), ("user", "What is mai"), ("assistant", "n(x)?  ")]
CHAT += [("user", "<b>&"), ("assistant", "No “idea”.\n")]
MESSAGES = [{"role": role, "content": content} for role, content in CHAT]
PAIR = parse_pair({"prompt": "a", "completion": "b"})
RECORD = parse_pair({"messages": MESSAGES})


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


BAD = [
    (None, "a JSON object with strings"),
    ({"prompt": "a", "completion": "  "}, '"completion" that is not empty'),
    (chat(("user", "a")), "an answer of the assistant as the last"),
    (chat(("tool", "a")), "in message 1, not 'tool'"),
    (chat(("user", [{"type": "text", "text": "a"}])), 'a string that is not empty as "content"'),
    (chat(("user", "a"), ("assistant", "b")) | {"tools": [{}]}, 'without "tools"'),
    (chat(("user", "a"), ("user", "b")), "assistant in message 2, not 'user'"),
]


@pytest.mark.parametrize(("record", "want"), BAD)
def test_a_bad_record_is_named_with_what_was_expected(record, want):
    with pytest.raises(ValueError, match=re.escape(want)):
        parse_pair(record)


@pytest.mark.parametrize(("prompt", "answer"), [("def f(x):", " return 1\n"), ("def mai", "n(x)")])
def test_labels_are_the_answer_and_the_end(prompt, answer):
    """Generation never sees the answer: it must not change the prompt's tokens."""
    alone = PLAIN.encode(prompt, add_bos=True, add_eos=False)
    together = PLAIN.encode(prompt + answer, add_bos=True, add_eos=True)
    record = parse_pair({"prompt": prompt, "completion": answer})
    encoder = PairEncoder(PLAIN)
    tokens = encoder.encode(record)
    labels = [t for t in tokens if t >= 0]
    assert [~t for t in tokens if t < 0] == alone == (~encoder.encode(record, False)).tolist()
    assert labels[-1] == PLAIN.eos_id and PLAIN.decode(labels) == answer
    # The second pair shows something: the text's tokens are others.
    assert (alone + labels == together) == (prompt != "def mai")


def test_every_answer_of_a_chat_is_a_label():
    turns = [("system", "rule"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    tokens = PairEncoder(PLAIN).encode(parse_pair(chat(*turns, ("assistant", "d"))))
    labels = [t for t in tokens if t >= 0]
    assert labels.count(PLAIN.eos_id) == 2 and PLAIN.decode(labels) == "bd"
    text = "### System:\nrule\n\n### User:\na\n\n### Assistant:\nb"
    text += "\n\n### User:\nc\n\n### Assistant:\nd"
    assert PLAIN.decode([t if t >= 0 else ~t for t in tokens]) == text


def folder_with(place, template):
    shutil.copytree(ASSETS, place, dirs_exist_ok=True)
    (place / "chat_template.jinja").write_text(template)
    return Tokenizer(str(place))


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% for %}", "a chat template in Jinja"),
        ("{{ raise_exception('no system') }}", r"every chat \(no system\); the chat begins"),
        ("{{ messages[0].__class__.__mro__ }}", "renders every chat"),
        ("{{ messages | length }}", "only grows"),
        ("same", "some text for every answer"),
    ],
)
def test_an_unusable_template_is_refused(tmp_path, template, want):
    with pytest.raises(ConfigError, match=want):
        PairEncoder(folder_with(tmp_path, template)).encode(RECORD)
    if template.strip():  # a prompt with its answer needs no template
        plain = PairEncoder(folder_with(tmp_path, template)).encode(PAIR).tolist()
        assert plain == [~0, *(~t for t in PLAIN.encode("a")), *PLAIN.encode("b"), 1]
