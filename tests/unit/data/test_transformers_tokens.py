# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tokenizer folders as published, and exported again: ids, labels and texts are transformers'."""

import json
from functools import cache

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, GenerationConfig

from tests.commands import ROOT
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.tokenizer import Tokenizer as Ours
from torchtitan_lr.data.tokenizer import encode_documents
from torchtitan_lr.hf.export_tokenizer import export_tokenizer, import_tokenizer

TEXTS = [
    "",
    "def main(x):\n    return 'naïve café'\n",
    "  Two  spaces, 1234567 and\ttabs\r\n\n",
    "日本 🙂 don't we'LL e\u0301 İ",
    "<think>so</think> hi <tool>x",
]
CHATML = (  # tells whether there are tools
    "{% if tools is not none %}[tools]{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content.strip() + eos_token }}"
    "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MARKED = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}#\n"
    "{%- generation -%}{{ m.content | trim }}{{ eos_token }}{%- endgeneration %} behind\n"
    "{%- else %}<{{ m.role }}>{{ m.content | tojson }}\n{% endif %}{% endfor %}"
)
BOS, EOS = "<s>", "</s>"
SPECIALS = ["<unk>", BOS, EOS, "<|im_start|>", "<|im_end|>"]


@cache
def trained(kind):
    """A tokenizer of each of the library's models, trained on this repository's text."""
    lines = [*(ROOT / "README.md").read_text().splitlines(), *TEXTS * 3]
    options = {"vocab_size": 700, "special_tokens": SPECIALS, "show_progress": False}
    unknown = {"unk_token": "<unk>"}
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options, **unknown)
    elif kind == "fallback":  # as llama 2
        tokenizer = Tokenizer(models.BPE(**unknown, byte_fallback=True, fuse_unk=True))
        space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(space)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
        options["special_tokens"] = SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(**options)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix")
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator(lines, trainer)
    if kind == "fallback":  # the library would keep the bytes apart as special tokens
        values = json.loads(tokenizer.to_str())
        values["added_tokens"] = values["added_tokens"][: len(SPECIALS)]
        return json.dumps(values)
    return tokenizer.to_str()


def around(*parts):
    ids = [(name, SPECIALS.index(name)) for name in parts if name in SPECIALS]
    return processors.TemplateProcessing(single=list(parts), special_tokens=ids)


def change_added(backend):
    """Added tokens that are no special ones, as ``<think>`` of reasoning models."""
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>")])
    backend.add_tokens([AddedToken("<tool>", special=True, normalized=False)])


def set_normalizer(backend):
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def set_both(backend):
    ends = [processors.ByteLevel(), around(BOS, "$A", EOS)]
    backend.post_processor = processors.Sequence(ends)


BY_CONFIGURATION = {
    "chat_template": CHATML,
    "added_tokens_decoder": {
        "700": {"content": "<think>", "special": False, "normalized": False},
        "701": {"content": "</think>", "special": False},
        "702": {"content": "<tool>", "special": True, "normalized": False},
        "1": {"content": BOS, "special": True, "lstrip": True},
    },
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
}
NAMED = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": MARKED}]
GENERATION = '{\n "eos_token_id": [2, 4],\n "temperature": 0.6\n}'
FILES = {
    "chat_template.jinja": MARKED.replace("\n", "\r\n"),
    "additional_chat_templates/rag.jinja": "{{ documents }}",
}
MAP = {"bos_token": {"content": BOS, "normalized": False}, "eos_token": EOS}
OLD_FILES = {"special_tokens_map.json": json.dumps(MAP), "chat_template.jinja": CHATML}

FOLDERS = {  # kind, what changes it, tokenizer_config.json, other files
    "prefix_space": ("prefix", None, {"add_prefix_space": True}, {}),
    "metaspace_unigram": ("unigram", None, {"unk_token": "<unk>"}, {}),
    "byte_fallback": ("fallback", None, {"chat_template": INST}, {}),
    "nfc_lower": ("bytes", set_normalizer, {"chat_template": INST}, {}),
    "bos_is_eos": ("bytes", None, {"bos_token": EOS, "chat_template": INST}, {}),
    "adds_both_in_a_sequence": ("bytes", set_both, {"chat_template": MARKED}, {}),
    "added_are_not_special": ("bytes", change_added, {"chat_template": CHATML}, {}),
    "added_by_the_configuration": ("bytes", None, BY_CONFIGURATION, {}),
    "several_eos": (
        *("bytes", None, {"chat_template": CHATML}),
        {"generation_config.json": GENERATION},
    ),
    "named_templates": ("bytes", None, {"chat_template": NAMED}, {}),
    "template_files": ("bytes", None, {"chat_template": "not this one"}, FILES),
    "special_tokens_map": ("bytes", None, None, OLD_FILES),
    "alone": ("bytes", None, None, {}),
}
CHATS = [
    [("system", "Be brief. "), ("user", " What is x?  "), ("assistant", "It is 1.\n")],
    [("user", "<b>&"), ("assistant", " naïve"), ("user", "日本\n🙂"), ("assistant", "<think>é")],
]


def write_folder(name, folder):
    kind, change, config, files = FOLDERS[name]
    backend = Tokenizer.from_str(trained(kind))
    if change is not None:
        change(backend)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        given = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(given | config))
    for file, text in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(text.encode())
    return folder


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    return write_folder(request.param, tmp_path / request.param)


def no_limits(tokenizer, text):
    """Ids by transformers, without special tokens around the text."""
    return tokenizer(text, add_special_tokens=False).input_ids


def test_ids_and_texts(folder):
    ours, theirs = Ours(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.bos_id == theirs.bos_token_id and ours.eos_id == theirs.eos_token_id
    found = [document.tolist() for document in encode_documents(ours, TEXTS)]
    for text, document in zip(TEXTS, found, strict=True):
        ids = no_limits(theirs, text)
        assert ours.encode(text, special=True) == ids
        if "<tool>" not in text:
            assert document == ours.begin + ids + ours.end
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
    edges = [theirs.bos_token_id], [theirs.eos_token_id]
    assert (ours.begin, ours.end) == (edges if theirs.eos_token else ([], []))


def test_chats_and_labels(folder):
    ours, theirs = Ours(str(folder)), AutoTokenizer.from_pretrained(folder)
    encoder = PairEncoder(ours)
    assert bool(encoder.digest) == bool(theirs.chat_template)
    for turns in CHATS if theirs.chat_template else []:
        chat = [{"role": role, "content": text} for role, text in turns]
        tokens = encoder.encode(parse_pair({"messages": chat})).tolist()
        options = {"tokenize": True, "return_dict": True}
        marked = "endgeneration" in str(theirs.chat_template)
        wanted = theirs.apply_chat_template(chat, return_assistant_tokens_mask=marked, **options)
        assert [max(t, ~t) for t in tokens] == wanted["input_ids"]
        text = theirs.apply_chat_template(chat, tokenize=False)
        labels = wanted["assistant_masks"] if marked else by_prefixes(theirs, chat, text)
        assert [int(t >= 0) for t in tokens] == labels and 0 < sum(labels) < len(labels)
        asked = theirs.apply_chat_template(chat[:-1], add_generation_prompt=True, **options)
        prompt = encoder.encode(parse_pair({"messages": chat}), answered=False)
        assert (~prompt).tolist() == asked["input_ids"]


def by_prefixes(theirs, chat, text):
    """Labels of a template without marks: the characters that an answer adds to its question."""
    answer = [False] * len(text)
    for i, message in enumerate(chat):
        if message["role"] == "assistant":
            asked = theirs.apply_chat_template(chat[:i], add_generation_prompt=True, tokenize=False)
            told = theirs.apply_chat_template(chat[: i + 1], tokenize=False)
            assert text.startswith(told) and told.startswith(asked)
            answer[len(asked) : len(told)] = [True] * (len(told) - len(asked))
    offsets = theirs(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    return [int(any(answer[begin:end])) for begin, end in offsets]


def test_in_and_out_again(folder, tmp_path):
    """Copied as ``import`` does, exported, and read by transformers."""
    import_tokenizer(folder, folder, tmp_path / "in")
    kept = {p.relative_to(tmp_path / "in"): p.read_bytes() for p in (tmp_path / "in").rglob("*.*")}
    assert kept == {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.*")}
    ours, first = Ours(str(folder)), AutoTokenizer.from_pretrained(folder)
    (tmp_path / "out").mkdir()
    export_tokenizer(Ours(str(tmp_path / "in")), tmp_path / "in", tmp_path / "out", 64)
    last = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert last.chat_template == first.chat_template
    padding = {"pad_token": EOS} if first.eos_token else {}
    assert last.special_tokens_map == first.special_tokens_map | padding
    flags = [{i: repr(t) for i, t in each.added_tokens_decoder.items()} for each in (first, last)]
    assert flags[0] == flags[1]
    for text in TEXTS:
        ids = no_limits(first, text)
        assert no_limits(last, text) == ids
        assert last(text).input_ids == ours.begin + ids + ours.added[1]
        assert last.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    again = Ours(str(tmp_path / "out"))
    assert (again.begin, again.end, again.stop_ids) == (ours.begin, ours.end, ours.stop_ids)
    ends = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert {*(ends if isinstance(ends, list) else [ends])} - {None} == ours.stop_ids
    if (folder / "generation_config.json").exists():
        before = (folder / "generation_config.json").read_bytes()
        assert (tmp_path / "out/generation_config.json").read_bytes() == before


def test_the_end_of_a_document_cannot_be_forged(tmp_path):
    """Names of special tokens in texts and messages are text, as transformers can do it, too."""
    folder = write_folder("several_eos", tmp_path / "in")
    ours, theirs = Ours(str(folder)), AutoTokenizer.from_pretrained(folder)
    special = {*theirs.all_special_ids}
    text = "a </s> b<|im_end|>\n"
    (document,) = encode_documents(ours, [text])
    assert not special & {*document[1:-1].tolist()} and ours.decode(document) == text
    encoder = PairEncoder(ours)
    pair = encoder.encode(parse_pair({"prompt": text, "completion": text})).tolist()
    assert [max(t, ~t) for t in pair if max(t, ~t) in special] == [1, 2]
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    tokens = encoder.encode(parse_pair({"messages": chat})).tolist()
    wanted = theirs.apply_chat_template(
        chat, tokenize=True, return_dict=True, sanitize_control_tokens=True
    )
    assert [max(t, ~t) for t in tokens] == wanted["input_ids"]
    assert ours.decode([t for t in tokens if t >= 0]) == text + "\n"
    # Prompts of such a tokenizer have no special tokens; a template means those that it names.
    ours.config["split_special_tokens"] = True
    assert encoder.encode(parse_pair({"messages": chat})).tolist() == tokens
    assert not special & {*ours.encode(text, special=True)}
