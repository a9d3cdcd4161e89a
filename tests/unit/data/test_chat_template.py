# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Chats by a template of the tokenizer's folder: tokens and labels are those of transformers."""

import json
import shutil

import pytest

from tests.commands import ROOT
from torchtitan_lr.data.chat_template import ChatTemplate
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan.base import HuggingFaceTokenizer

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
RECORD = parse_pair({"messages": MESSAGES})


def folder_with(tmp_path, template=None, in_config=None):
    for file in (ROOT / "torchtitan_lr/data/assets/bpe4k").iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(4096 + i): {"content": text, "special": True}
        for i, text in enumerate(("<|start|>", "<|stop|>"))
    }
    if in_config is not None:
        config["chat_template"] = in_config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return HuggingFaceTokenizer(str(tmp_path))


@pytest.mark.parametrize("bos", [True, False])
def test_tokens_and_labels_are_those_of_transformers(tmp_path, bos):
    from transformers import PreTrainedTokenizerFast

    template = MARKED if bos else MARKED.removeprefix("{{- bos_token }}")
    tokenizer = folder_with(tmp_path, template)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.tokenizer,
        bos_token=tokenizer.bos_token,
        chat_template=template,
    )
    expected = reference.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    encoder = PairEncoder(tokenizer)
    tokens = encoder.encode(RECORD).tolist()
    assert [t if t >= 0 else ~t for t in tokens] == list(expected["input_ids"])
    assert [int(t >= 0) for t in tokens] == list(expected["assistant_masks"])
    prompt, answer = encoder.prompt(RECORD)
    asked = reference.apply_chat_template(MESSAGES[:-1], add_generation_prompt=True, tokenize=False)
    assert prompt == tokenizer.tokenizer.encode(asked).ids and answer == "No “idea”.\n"
    # Pairs take no template.
    plain = encoder.encode(parse_pair({"prompt": "a", "completion": "b"})).tolist()
    assert plain == [~0, *(~t for t in tokenizer.encode("a")), *tokenizer.encode("b"), 1]


def test_the_config_can_hold_the_template_too(tmp_path):
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": MARKED}]
    for i, given in enumerate((MARKED, named)):
        (tmp_path / str(i)).mkdir()
        tokenizer = folder_with(tmp_path / str(i), in_config=given)
        found = ChatTemplate.of(tokenizer)
        assert found.segments(MESSAGES)[0].text.endswith("What is mai<|stop|><|start|>assistant\n")
        assert ChatTemplate.of(tokenizer).digest == ChatTemplate(MARKED).digest != ""


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% for %}", "a chat template in Jinja"),
        (" ", "a chat template, or none at all"),
        (
            "{{ raise_exception('no system') }}",
            r"every chat \(no system\); the chat begins",
        ),
        ("{{ messages[0].__class__.__mro__ }}", "renders every chat"),
        ("{{ messages | length }}", "only grows"),
        ("same", "some text for every answer"),
    ],
)
def test_an_unusable_template_is_refused(tmp_path, template, want):
    tokenizer = folder_with(tmp_path, template)
    with pytest.raises(ConfigError, match=want):
        PairEncoder(tokenizer).encode(RECORD)
