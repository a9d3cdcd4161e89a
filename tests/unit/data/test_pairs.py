# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats: which tokens are labels, which records and templates are refused."""

import hashlib
import json
import re
import shutil

import pytest
from transformers import PreTrainedTokenizerFast

from tests.commands import ROOT
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan.base import HuggingFaceTokenizer

ASSETS = ROOT / "torchtitan_lr/data/assets/bpe4k"
PLAIN = HuggingFaceTokenizer(str(ASSETS))
MARKED = (
    "{{- bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|stop|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|stop|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
CHAT = [("system", "Be brief. "), ("user", "What is mai"), ("assistant", "n(x)?  ")]
CHAT += [("user", "<b>&"), ("assistant", "No “idea”.\n")]
MESSAGES = [{"role": role, "content": content} for role, content in CHAT]
PAIR = parse_pair({"prompt": "a", "completion": "b"})
RECORD = parse_pair({"messages": MESSAGES})


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


BAD = [
    (None, "a JSON object with strings"),
    ({"prompt": "a"}, 'strings "prompt" and "completion"'),
    ({"prompt": "a", "completion": "  "}, '"completion" that is not empty'),
    (chat(), "a list of messages"),
    (chat(("user", "a")), "an answer of the assistant as the last"),
    (chat(("assistant", "a")), "system or user in message 1"),
    (chat(("tool", "a")), "in message 1, not 'tool'"),
    (chat(("user", "")), '"content" that is not empty in message 1'),
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


def folder_with(place, template, where="file"):
    """A tokenizer's folder with a template in its own file or in the configuration."""
    shutil.copytree(ASSETS, place, dirs_exist_ok=True)
    config = json.loads((place / "tokenizer_config.json").read_text())
    marks = enumerate(("<|start|>", "<|stop|>"), 4096)
    config["added_tokens_decoder"] = {str(i): {"content": t, "special": True} for i, t in marks}
    if where == "file":
        (place / "chat_template.jinja").write_text(template)
    else:
        named = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
        config["chat_template"] = template if where == "config" else named
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(str(place))


@pytest.mark.parametrize("where", ["file", "config", "names"])
@pytest.mark.parametrize("bos", [True, False])
def test_tokens_and_labels_are_those_of_transformers(tmp_path, bos, where):
    template = MARKED if bos else MARKED.removeprefix("{{- bos_token }}")
    tokenizer = folder_with(tmp_path, template, where)
    options = {"bos_token": tokenizer.bos_token, "chat_template": template}
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer.tokenizer, **options)
    expected = reference.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    encoder = PairEncoder(tokenizer)
    assert encoder.digest == hashlib.sha256(template.encode()).hexdigest()[:8]
    tokens = encoder.encode(RECORD).tolist()
    assert [t if t >= 0 else ~t for t in tokens] == list(expected["input_ids"])
    assert [int(t >= 0) for t in tokens] == list(expected["assistant_masks"])
    prompt = [t if t >= 0 else ~t for t in encoder.encode(RECORD, answered=False).tolist()]
    asked = reference.apply_chat_template(MESSAGES[:-1], add_generation_prompt=True, tokenize=False)
    assert prompt == tokenizer.tokenizer.encode(asked).ids
    # Pairs take no template.
    plain = encoder.encode(PAIR).tolist()
    assert plain == [~0, *(~t for t in tokenizer.encode("a")), *tokenizer.encode("b"), 1]


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% for %}", "a chat template in Jinja"),
        (" ", "a chat template in Jinja, or none at all"),
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
        assert len(PairEncoder(folder_with(tmp_path, template)).encode(PAIR)) == 4
