# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tokenizers: the shipped ones, what their identity follows, what is refused."""

import importlib.metadata
import shutil

import pytest
import tokenizers

from torchtitan_lr.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    resolve_assets_path,
    tokenizer_identity,
    vocabulary,
)
from torchtitan_lr.errors import ConfigError

SHIPPED = "torchtitan_lr/data/assets/bpe4k"
BPE32K = "torchtitan_lr/data/assets/bpe32k"
TEXT = "def f(x):\n    return x ** 2  # caf\u00e9 漢字 \U0001f600\n\n\tDon't we'LL 12345"


@pytest.mark.parametrize(
    ("path", "size", "most"), [(SHIPPED, 4096, 400_000), (BPE32K, 32_000, 2_500_000)]
)
def test_the_shipped_tokenizers(path, size, most):
    tokenizer = build_tokenizer(path)
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert vocabulary(tokenizer) == size
    ids = tokenizer.encode(TEXT, add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert not {0, 1} & set(ids[1:-1]) and tokenizer.decode(ids) == TEXT
    assert sum(file.stat().st_size for file in resolve_assets_path(path).iterdir()) < most


def test_identity_follows_all_that_determines_the_ids(tmp_path, monkeypatch):
    """And not how a version of the library writes a tokenizer."""
    changed = [Tokenizer(SHIPPED) for _ in range(5)]
    here = tokenizer_identity(changed[0])
    changed[1].eos_id = 7
    changed[2].tokenizer.add_tokens(["return x"])
    changed[3].config["split_special_tokens"] = True
    changed[4].tokenizer.normalizer = tokenizers.normalizers.NFKC()
    assert len({*map(tokenizer_identity, changed)}) == 5
    shutil.copytree(resolve_assets_path(SHIPPED), tmp_path / "copy")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.9")
    assert tokenizer_identity(Tokenizer(str(tmp_path / "copy"))) == here


EMPTY = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str()


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("", None, "a folder that holds tokenizer.json"),
        ("", EMPTY, "it has no tokens"),
        ("y" * 260, None, "a path to use here"),
    ],
)
def test_a_missing_or_broken_tokenizer_is_refused_in_one_line(tmp_path, name, content, want):
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        build_tokenizer(name or str(tmp_path))
    text = str(error.value)
    assert text.startswith("model.hf_assets_path: got ") and "\n" not in text
    assert (name or str(tmp_path))[:99] in text and want in text
