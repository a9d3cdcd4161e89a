# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What of a run's corpora is refused or told before any rank starts."""

import json
import logging

import pytest

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.checks import check_corpora
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.prepare import ensure_prepared
from torchtitan_lr.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    """A job on 60 lines of text, of which one in ten or more is held out."""
    corpus = tmp_path / "corpus"
    (corpus / "sub").mkdir(parents=True)
    lines = [json.dumps({"text": f"text {i} and more of it"}) for i in range(60)]
    (corpus / "a.jsonl").write_text("\n".join(lines))
    (corpus / "sub/b.jsonl").write_text(json.dumps({"text": "one more"}))
    (corpus / "link.jsonl").symlink_to(corpus / "a.jsonl")
    (tmp_path / "other.jsonl").write_text("\n".join(lines[:9]))

    def build(*arguments):
        own = [f"--training.token_folder={tmp_path}/tokens", "--model.hf_assets_path=" + ASSETS]
        own += ["--training.dataset=local", f"--training.dataset_path={corpus}/a.jsonl"]
        own += ["--training.seq_len=16", "--validation.seq_len=16", "--validation.enable"]
        return build_job_config([*own, "--validation.local_batch_size=2", *arguments])

    return build


ASSETS = "torchtitan_lr/data/assets/bpe4k"


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl", "../corpus", "link.jsonl"])
def test_validation_on_files_that_are_trained_on_is_refused(tmp_path, config, pattern):
    named = "--validation.dataset=local"
    with pytest.raises(ConfigError) as error:
        check_corpora(config(named, f"--validation.dataset_path={tmp_path}/corpus/{pattern}"), 1)
    text = str(error.value)
    assert text.startswith("validation.dataset_path: got ") and "\n" not in text
    assert "not trained on" in text and "validation.dataset = 'training'" in text
    check_corpora(config(named, f"--validation.dataset_path={tmp_path}/other.jsonl"), 1)


@pytest.mark.parametrize("section", ["training", "validation"])
def test_a_part_without_one_sequence_is_refused(config, section):
    (part,) = ensure_prepared(config())
    tokens = Corpus.open(part.folder).tokens(held_out=section == "validation")
    check_corpora(config(f"--{section}.seq_len={tokens - 1}"), 1)
    with pytest.raises(ConfigError) as error:
        check_corpora(config(f"--{section}.seq_len={tokens}"), 1)
    text = str(error.value)
    assert text.startswith(f"{section}.seq_len: got {tokens}, expected at most {tokens - 1}: ")
    assert f"has {tokens} tokens" in text and "\n" not in text
    check_corpora(config("--training.seq_len=16", "--validation.no_enable"), 1)


def test_a_small_held_out_part_and_pairs_that_are_cut_are_told(tmp_path, config, caplog):
    with caplog.at_level(logging.WARNING):
        check_corpora(config(), 1)
        assert not caplog.text
        check_corpora(config("--validation.local_batch_size=400"), 1)
    assert "fewer than a validation batch of 400" in caplog.text
    records = [{"prompt": f"a{i}", "completion": " b" * 20 * (i % 2)} for i in range(1, 60)]
    records += [{"prompt": "long " * 40, "completion": f"b{i}"} for i in range(7)]
    for record in records:
        record["completion"] = record["completion"] or "c"
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(record) + "\n" for record in records))
    with caplog.at_level(logging.WARNING):
        check_corpora(config(f"--training.dataset_path={pairs}", "--validation.no_enable"), 1)
    assert "are longer than training.seq_len = 16 and are cut" in caplog.text
    with pytest.raises(ConfigError, match=r"^training.seq_len: got 1, expected more tokens: in"):
        check_corpora(config(f"--training.dataset_path={pairs}", "--training.seq_len=1"), 1)
