# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Counts of a corpus, against counts by hand."""

import json

import pytest

from tests.scripts import load_script
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.local_corpus import LocalCorpus
from torchtitan_lr.data.tokenizer import build_tokenizer

TEXTS = [f"döcument {i} " + "word " * (i % 40) for i in range(400)]


@pytest.fixture
def arguments(tmp_path):
    for name, texts in (("a", TEXTS), ("b", TEXTS[:50])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    lines = ["[training]", "local_batch_size = 3", "seq_len = 32", "[validation]", "enable = true"]
    for name, weight in (("a", 3), ("b", 1)):
        lines += ["[[training.mixture]]", 'dataset = "local"', f'name = "{name}"']
        lines += [f'path = "{tmp_path}/{name}.jsonl"', f"weight = {weight}"]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    return [str(tmp_path / "run.toml"), "--steps", "20", "--world", "4"]


def run(capsys, *arguments):
    assert load_script("data_stats").main(list(arguments)) == 0
    return capsys.readouterr().out


def test_counts(arguments, tmp_path, capsys):
    report = json.loads(run(capsys, *arguments, "--json"))
    kinds = [(row["name"], row["part"]) for row in report["corpora"]]
    assert kinds == [("a", "train"), ("b", "train"), ("a", "held out"), ("b", "held out")]
    tokenizer = build_tokenizer(build_job_config([]))
    for row, split in zip(report["corpora"], ["train"] * 2 + ["validation"] * 2, strict=True):
        texts = list(LocalCorpus(f"{tmp_path}/{row['name']}.jsonl", "k", split=split))
        lengths = [len(tokenizer.encode(text, add_bos=True, add_eos=True)) for text in texts]
        assert row["documents"] == len(texts) == sum(row["histogram"].values())
        assert row["tokens"] == sum(lengths) and row["longest"] == max(lengths)
        assert row["bytes"] == sum(len(text.encode()) for text in texts)
        for power, n in row["histogram"].items():
            assert n == sum(int(power) // 2 <= length < int(power) for length in lengths)
    tokens = 20 * 12 * 33
    assert report["run"]["tokens"] == tokens
    each = zip(report["run"]["corpora"], report["corpora"][:2], (0.75, 0.25), strict=True)
    for row, counted, weight in each:
        assert row["share"] == weight
        assert row["epochs"] == pytest.approx(weight * tokens / counted["tokens"])


def test_tables_and_a_part_of_the_documents(arguments, capsys):
    text = run(capsys, *arguments, "--documents", "60")
    assert "a, train (not all)" in text and "b, train " in text
    assert "a: 5,940 tokens (75.0%), an unknown number of epochs" in text
    assert "20 steps of 12 sequences: 7,920 tokens" in text


def test_a_missing_corpus_is_one_line(arguments, capsys):
    script = load_script("data_stats")
    assert script.main([*arguments, "--training.dataset_path=x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: training.dataset_path") and error.count("\n") == 1
