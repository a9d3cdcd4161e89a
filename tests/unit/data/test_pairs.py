# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats: which tokens are labels, and which records are refused."""

import json
import re

import pytest

from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.sources import CUE, documented_functions
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.titan.base import JobConfig


@pytest.fixture(scope="module")
def tokenizer():
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    return build_tokenizer(job)


BAD = [
    ("{", "a JSON object with strings"),
    ('{"prompt": "a"}', 'strings "prompt" and "completion"'),
    ('{"prompt": 1, "completion": "b"}', 'strings "prompt" and "completion"'),
    ('{"prompt": "a", "completion": "  "}', '"completion" that is not empty'),
    ('{"messages": []}', "a list of messages"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "an answer of the assistant as the last"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "system or user in message 1"),
    ('{"messages": [{"role": "tool", "content": "a"}]}', "in message 1, not 'tool'"),
    ('{"messages": [{"role": "user", "content": ""}]}', '"content" that is not empty in message 1'),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
        "assistant in message 2, not user",
    ),
    ('{"text": "plain"}', 'strings "prompt" and "completion"'),
]


@pytest.mark.parametrize(("line", "want"), BAD)
def test_a_bad_record_is_named_with_what_was_expected(line, want):
    with pytest.raises(ValueError, match=re.escape(want)):
        parse_pair(json.loads(line) if line != "{" else None)


def test_labels_are_the_answer_and_the_end(tokenizer):
    encoder = PairEncoder(tokenizer)
    tokens = encoder.encode(parse_pair({"prompt": "def f(x):", "completion": " return 1\n"}))
    prompt = tokenizer.encode("def f(x):", add_bos=True, add_eos=False)
    assert (~tokens[: len(prompt)]).tolist() == prompt
    answer = tokens[len(prompt) :].tolist()
    assert answer[-1] == tokenizer.eos_id and tokenizer.decode(answer) == " return 1\n"
    whole = tokenizer.encode("def f(x): return 1\n", add_bos=True, add_eos=True)
    assert prompt + answer == whole
    assert encoder.prompt(parse_pair({"prompt": "a", "completion": "b"}))[1] == "b"


def test_a_prompt_keeps_its_tokens_where_the_text_would_merge_them(tokenizer):
    """Generation never sees the answer, so training must not let it change the prompt's end."""
    prompt, answer = "def mai", "n(x)"
    alone = tokenizer.encode(prompt, add_bos=True, add_eos=False)
    merged = tokenizer.encode(prompt + answer, add_bos=True, add_eos=False)
    assert merged[: len(alone)] != alone  # otherwise this shows nothing
    record = parse_pair({"prompt": prompt, "completion": answer})
    tokens = PairEncoder(tokenizer).encode(record)
    assert [~t for t in tokens if t < 0] == alone == PairEncoder(tokenizer).prompt(record)[0]
    assert tokenizer.decode([t for t in tokens if t >= 0]) == answer


def test_every_answer_of_a_chat_is_a_label(tokenizer):
    turns = [("system", "rule"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("assistant", "d")]]
    tokens = PairEncoder(tokenizer).encode(parse_pair({"messages": messages}))
    labels = [t for t in tokens if t >= 0]
    assert labels.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(labels) == "bd"
    text = tokenizer.decode([t if t >= 0 else ~t for t in tokens])
    expected = "### System:\nrule\n\n### User:\na\n\n### Assistant:\nb"
    assert text == expected + "\n\n### User:\nc\n\n### Assistant:\nd"


LIBRARY = '''
def first(x):
    """Return x.

    More.
    """
    return x


class A:
    @property
    def second(self):  # a comment
        "Says nothing"
        y = """a
string"""
        return y

    def third(self):
        """Only this."""

    def fourth(self): "One line"; return 4
\x0c
async def fifth():
    """
    Starts late.
    """
    pass
'''


def test_functions_lose_their_docstrings():
    found = [json.loads(record) for record in documented_functions(LIBRARY)]
    assert [record["completion"] for record in found] == [
        " Return x.",
        " Says nothing",
        " Starts late.",
    ]
    prompts = [record["prompt"].removesuffix(CUE) for record in found]
    assert prompts[0] == "def first(x):\n    return x"
    assert prompts[1].startswith("    def second(self):  # a comment\n        y =")
    assert prompts[2] == "async def fifth():\n    pass"
    assert list(documented_functions("def (")) == []
