# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tokenizers: the shipped one, rank files, what is refused."""

import os
import shutil

import huggingface_hub
import pytest

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.sources import Source, texts
from torchtitan_lr.data.tokenizer import (
    TiktokenTokenizer,
    build_tokenizer,
    check_tokenizer,
    llama3_specials,
    resolve_assets_path,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan.base import HuggingFaceTokenizer, JobConfig

SHIPPED = "torchtitan_lr/data/assets/bpe4k"
BPE32K = "torchtitan_lr/data/assets/bpe32k"
TEXT = "def f(x):\n    return x ** 2  # caf\u00e9 漢字 \U0001f600\n\n\tDon't we'LL 12345"


def config(path):
    job = JobConfig()
    job.model.hf_assets_path = str(path)
    return job


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory):
    """A real rank file: the shipped merges, written by the training script's own writer."""
    from torchtitan_lr.data.train_tokenizer import save_tiktoken, train_bpe

    out = tmp_path_factory.mktemp("ranks")
    save_tiktoken(train_bpe(texts(Source("cpython"), held_out=True), 600, []), out)
    return out / "tokenizer.model"


@pytest.fixture(scope="module")
def ranks(rank_file):
    return TiktokenTokenizer(rank_file)


def test_shipped_tokenizer():
    tokenizer = build_tokenizer(config(SHIPPED))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.get_vocab_size() == check_tokenizer(config(SHIPPED)) == 4096
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    ids = tokenizer.encode(TEXT, add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (0, 1) and not {0, 1} & set(ids[1:-1])
    assert tokenizer.decode(ids) == TEXT
    size = sum(file.stat().st_size for file in resolve_assets_path(SHIPPED).iterdir())
    assert size < 400_000


def test_llama3_specials():
    specials = llama3_specials(128_000)
    assert len(specials) == 256 and sorted(specials.values()) == list(range(128_000, 128_256))
    # Llama 3.1's published ids.
    assert specials["<|begin_of_text|>"] == 128_000
    assert specials["<|end_of_text|>"] == 128_001
    assert specials["<|reserved_special_token_0|>"] == 128_002
    assert specials["<|finetune_right_pad_id|>"] == 128_004
    assert specials["<|start_header_id|>"] == 128_006
    assert specials["<|eot_id|>"] == 128_009
    assert specials["<|python_tag|>"] == 128_010
    assert specials["<|reserved_special_token_3|>"] == 128_011
    assert specials["<|reserved_special_token_247|>"] == 128_255


def test_rank_file_is_chosen_and_round_trips(rank_file, ranks):
    built = build_tokenizer(config(rank_file.parent))
    assert isinstance(built, TiktokenTokenizer)
    assert check_tokenizer(config(rank_file.parent)) == ranks.get_vocab_size() == 600 + 256
    ids = ranks.encode(TEXT, add_bos=True, add_eos=True)
    assert ids[0] == ranks.bos_id == 600 and ids[-1] == ranks.eos_id == 601
    assert ranks.decode(ids) == TEXT
    assert ranks.decode(ids, skip_special_tokens=False) == (
        "<|begin_of_text|>" + TEXT + "<|end_of_text|>"
    )
    assert ranks.encode(TEXT, add_bos=False, add_eos=False) == ids[1:-1]
    assert ranks.encode("", add_bos=False, add_eos=False) == []


def test_a_document_cannot_forge_a_special_token(ranks):
    ids = ranks.encode("<|end_of_text|>", add_bos=False, add_eos=False)
    assert max(ids) < ranks.bos_id and ranks.decode(ids) == "<|end_of_text|>"


def test_missing_and_broken_tokenizers_are_refused(tmp_path):
    broken_json, broken_ranks, sentencepiece, gap = (tmp_path / name for name in "abcd")
    empty = tmp_path / "empty"
    for folder in (broken_json, broken_ranks, sentencepiece, gap, empty):
        folder.mkdir()
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(empty / "tokenizer.json"))
    (broken_json / "tokenizer.json").write_text("{}")
    (broken_ranks / "tokenizer.model").write_text("no base64 here\n")
    (sentencepiece / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15" + os.urandom(99))
    (gap / "tokenizer.model").write_text("YQ== 0\nYg== 2\n")
    cases = [
        (tmp_path / "missing", "tokenizer.json or tokenizer.model"),
        (tmp_path, "tokenizer.json or tokenizer.model"),
        (broken_json, "a readable tokenizer.json"),
        (broken_ranks, "a tiktoken rank file"),
        (sentencepiece, "a tiktoken rank file"),
        (gap, "a tiktoken rank file"),
        (empty, "a tokenizer with some tokens"),
        ("~nosuchuser/tokenizer", "a path to use here"),
        (tmp_path / ("x" * 150) / ("y" * 150), "tokenizer.json or tokenizer.model"),
        ("y" * 260, "a path to use here"),
    ]
    for folder, part in cases:
        with pytest.raises(ConfigError) as error:
            check_tokenizer(config(folder))
        text = str(error.value)
        assert text.startswith("model.hf_assets_path: got ") and "\n" not in text
        assert str(folder)[:99] in text and part in text


def test_the_papers_sizes_have_a_tokenizer_in_the_package():
    """Exactly 32,000 ids without gaps, and text comes back; 4,096 tokens take half as many more."""
    tokenizer, small = build_tokenizer(config(BPE32K)), build_tokenizer(config(SHIPPED))
    assert sorted(tokenizer.get_vocab().values()) == list(range(32_000))
    assert check_tokenizer(config(BPE32K)) == 32_000
    assert sum(file.stat().st_size for file in resolve_assets_path(BPE32K).iterdir()) < 2_500_000
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    prose = "The committee published its findings on Thursday; several members disagreed with them."
    assert 1.4 * len(tokenizer.encode(prose)) < len(small.encode(prose))
    for name in ("cola_130m", "cola_1b", "boost_3b", "lax_1b"):
        job = build_job_config([f"--job.config_file=train_configs/{name}.toml"])
        assert job.model.hf_assets_path == BPE32K


def test_a_tokenizer_of_the_hub_that_is_out_of_reach_names_both_ways_out(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as error:
        build_tokenizer(config("hf://someone/no-such-tokenizer"))
    text = str(error.value)
    assert "hf download someone/no-such-tokenizer" in text and BPE32K in text and "\n" not in text


def test_a_tokenizer_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    """The layout of the cache, written by hand: a reference and the snapshot that it names."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--theirs"
    shutil.copytree(resolve_assets_path(SHIPPED), folder / "snapshots" / "c0ffee")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    tokenizer = build_tokenizer(config("hf://someone/theirs"))
    assert tokenizer.encode(TEXT) == build_tokenizer(config(SHIPPED)).encode(TEXT)
