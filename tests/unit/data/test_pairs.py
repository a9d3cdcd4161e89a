# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats: which tokens are labels, which records are refused, and the batches of them."""

import json
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_lr.data import checks
from torchtitan_lr.data.corpora import build_corpus
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.data.held_out import document_hash
from torchtitan_lr.data.local_corpus import LocalCorpus
from torchtitan_lr.data.pair_corpora import CUE, LocalPairs, documented_functions
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.data.validation import build_validation_set
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import JobConfig

ROWS, SEQ, COUNT = 8, 24, 90
SPLITS = [(1, 8), (2, 2), (4, 2), (8, 1)]


@pytest.fixture(scope="module")
def tokenizer():
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    return build_tokenizer(job)


def pair(i):
    """A short pair, a chat, or one longer than a window; every answer is different."""
    if i % 9 == 0:
        return {"prompt": f"list {i}: " + "many words " * 9, "completion": f"answer {i}"}
    if i % 3 == 0:
        turns = [("system", f"rule {i}"), ("user", "a"), ("assistant", f"b{i}"), ("user", "c")]
        turns += [("assistant", f"d{i}")]
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
    return {"prompt": f"question {i}:", "completion": f" reply {i}" + " more" * (i % 40)}


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "pairs" / "a.jsonl", map(pair, range(COUNT)))


def config(path, local_batch=ROWS, seq_len=SEQ, rows=ROWS):
    job = JobConfig()
    job.training.dataset, job.training.dataset_path = "local", path
    job.training.seq_len, job.training.local_batch_size = seq_len, local_batch
    job.training.global_batch_size = rows
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    job.validation.dataset, job.validation.dataset_path = "training", None
    job.validation.seq_len, job.validation.local_batch_size = seq_len, 2
    job.validation.steps = -1
    job.training.max_bad_records = 0
    return job


def build(tokenizer, dp, local_batch, path, seq_len=SEQ):
    job = config(path, local_batch, seq_len)
    return [
        build_dataloader(dp_world_size=dp, dp_rank=rank, tokenizer=tokenizer, job_config=job)
        for rank in range(dp)
    ]


def steps(loaders, local_batch, n):
    """Return n global batches (2, n, rows, seq): inputs and labels, rows in global order."""
    readers, found = [iter(loader) for loader in loaders], []
    for _ in range(n * ROWS // (local_batch * len(loaders))):
        found += [torch.stack([x["input"], y]) for x, y in map(next, readers)]
    return torch.cat(found, 1).unflatten(1, (n, ROWS))


def answer_of(tokenizer, labels):
    return tokenizer.decode(labels[labels != IGNORE_INDEX].tolist())


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
def test_a_bad_record_is_named_with_its_line_or_counted(tmp_path, line, want):
    path = tmp_path / "a.jsonl"
    good = [json.dumps(pair(i)) for i in range(6)]
    path.write_text("\n".join([*good[:4], line, *good[4:]]))
    with pytest.raises(DataError) as info:
        list(build_corpus("local", str(path), "all", "training"))
    assert info.value.got == f"{path}:5" and want in info.value.want
    found = build_corpus("local", str(path), "all", "training", max_bad_records=1)
    assert len(list(found)) == 6 and found.skipped == {f"{path}:5"}


def test_a_line_that_is_no_pair_is_bad_in_a_corpus_of_pairs_alone(tmp_path):
    plain = write(tmp_path / "a.jsonl", [{"text": "plain", "prompt": "a tag"}])
    assert type(build_corpus("local", plain, "all", "training")) is LocalCorpus
    write(tmp_path / "b" / "a.jsonl", [pair(1)])
    (tmp_path / "b" / "c.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"c\.txt', expected only \.jsonl files"):
        build_corpus("local", str(tmp_path / "b"), "all", "training")


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
    tokens = PairEncoder(tokenizer).encode(parse_pair(pair(3)))
    labels = [t for t in tokens if t >= 0]
    assert labels.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(labels) == "b3d3"
    text = tokenizer.decode([t if t >= 0 else ~t for t in tokens])
    expected = "### System:\nrule 3\n\n### User:\na\n\n### Assistant:\nb3"
    assert text == expected + "\n\n### User:\nc\n\n### Assistant:\nd3"


def test_rows_are_whole_pairs_cut_or_padded(tokenizer, corpus):
    inputs, labels = steps(build(tokenizer, 1, ROWS, corpus), ROWS, 60).flatten(1, 2)
    train = [json.loads(r) for r in LocalPairs(corpus, "k", ROWS, "train").records()]
    by_tokens = {}
    for record in train:
        tokens = PairEncoder(tokenizer).encode(parse_pair(record))[: SEQ + 1]
        if (tokens[1:] >= 0).any():
            row = torch.from_numpy(tokens).long()
            x, y = row[:-1], row[1:]
            by_tokens[tuple(torch.where(x < 0, ~x, x).tolist())] = y
    seen = set()
    for x, y in zip(inputs, labels, strict=True):
        (key,) = {key for key in by_tokens if key == tuple(x[: len(key)].tolist())}
        expected = by_tokens[key]
        assert torch.equal(y[: len(key)], torch.where(expected < 0, IGNORE_INDEX, expected))
        assert (y[len(key) :] == IGNORE_INDEX).all() and (y != IGNORE_INDEX).any()
        assert (x >= 0).all()
        seen.add(key)
    assert seen == set(by_tokens)  # and no prompt that fills the row: those are left out
    assert 0 < len(by_tokens) < len(train)


@pytest.mark.parametrize("split", SPLITS)
def test_batches_and_resume_do_not_depend_on_the_split(tokenizer, corpus, tmp_path, split):
    loaders = build(tokenizer, 1, ROWS, corpus)
    steps(loaders, ROWS, 7)
    dcp.save({"dataloader": loaders[0]}, checkpoint_id=str(tmp_path / "ckpt"))
    expected = steps(loaders, ROWS, 30)
    resumed = build(tokenizer, *split, corpus)
    for loader in resumed:
        dcp.load({"dataloader": loader}, checkpoint_id=str(tmp_path / "ckpt"))
    assert torch.equal(steps(resumed, split[1], 30), expected)
    fresh = build(tokenizer, *split, corpus)
    assert not torch.equal(steps(fresh, split[1], 30), expected)  # negative control


def test_copies_of_a_question_share_a_split(tmp_path):
    records = [
        {"prompt": f"question {i % 40}", "completion": f"answer {i}"} for i in range(120)
    ] + [pair(3), pair(6)]
    path = write(tmp_path / "a.jsonl", records)
    sides = [
        {json.loads(r).get("prompt", r) for r in LocalPairs(path, "k", 8, split).records()}
        for split in ("train", "validation")
    ]
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    # By the whole record, a question would be on both sides.
    halves = [set(), set()]
    for record in records[:120]:
        halves[document_hash(parse_pair(record)) % 2].add(record["prompt"])
    assert halves[0] & halves[1]


@pytest.mark.parametrize("dp", [1, 3])
def test_validation_counts_the_answers_alone(tokenizer, corpus, dp):
    job = config(corpus)
    sets = [build_validation_set(job, dp, rank, tokenizer) for rank in range(dp)]
    texts, tokens = set(), 0
    for one in sets:
        for inputs, labels in one:
            assert (inputs["input"] >= 0).all()
            tokens += int((labels != IGNORE_INDEX).sum())
            texts |= {answer_of(tokenizer, row) for row in labels} - {""}
    rows = [
        PairEncoder(tokenizer).row(record, SEQ + 1)
        for record in LocalPairs(corpus, "k", None, "validation").records()
    ]
    labels = [row[1:][row[1:] >= 0] for row in rows if row is not None]
    assert texts == {tokenizer.decode(row.tolist()) for row in labels}
    assert {one.num_tokens for one in sets} == {tokens} == {sum(map(len, labels))}
    assert len({len(one) for one in sets}) == 1


def test_too_long_prompts_are_told_before_the_run_or_refused(tokenizer, corpus, caplog):
    job = config(corpus)
    job.validation.enable = False
    with caplog.at_level(logging.WARNING):
        checks.check_sequences(job, tokenizer)
    assert "training.seq_len = 24: of the first" in caplog.text
    assert "no room for an answer and are left out" in caplog.text
    job.training.seq_len = 2
    with pytest.raises(ConfigError, match=r"training.seq_len: got 2, expected more tokens"):
        checks.check_sequences(job, tokenizer)


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
