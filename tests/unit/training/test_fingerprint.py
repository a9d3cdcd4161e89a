# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Models whose weights look alike are told apart."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT
from tests.unit.tiny import tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.training.fingerprint import (
    check_fingerprint,
    model_fingerprint,
    tokenizer_digest,
)

ASSETS = "torchtitan_lr/data/assets/bpe4k"

# What the weights do not tell: the changes, and the key that is blamed.
UNSEEN: list[tuple[str, dict[str, Any], str]] = [
    ("svd", {"family": "cola"}, "model.name: got 'llama_cola', expected 'llama_svd' as in the "),
    ("cola", {"activation": "lowrank"}, "low_rank.activation: got 'lowrank', expected 'both'"),
    ("full", {"n_heads": 8, "n_kv_heads": 8}, "model.flavor: got {'n_heads': 8, 'n_kv_heads': 8}"),
    ("full", {"rope_theta": 5e5}, "model.flavor: got {'rope_theta': 500000.0}, expected {'rope_"),
    ("full", {"norm_eps": 1e-5}, "model.flavor: got {'norm_eps': 1e-05}"),
    ("full", {"lanes": 2}, "caat.lanes: got 2, expected 1 "),
]


def as_json(value: dict[str, Any]) -> dict[str, Any]:
    restored: dict[str, Any] = json.loads(json.dumps(value))
    return restored


@pytest.mark.parametrize(("family", "changes", "line"), UNSEEN)
def test_what_no_shape_tells(family: str, changes: dict[str, Any], line: str) -> None:
    stored = tiny_args(family)
    here = dataclasses.replace(stored, **changes)
    shapes = [
        {name: value.shape for name, value in LlamaModel(args).state_dict().items()}
        for args in (stored, here)
    ]
    assert shapes[0] == shapes[1]  # the case is worth telling
    with pytest.raises(ConfigError) as error:
        check_fingerprint(as_json(model_fingerprint(stored)), model_fingerprint(here), "a/step-4")
    assert str(error.value).startswith(line)
    assert "a/step-4" in str(error.value)


@pytest.mark.parametrize(
    ("stored", "here", "line"),
    [
        ((4, 0.5), (2, 0.5), "caat.lanes: got 2, expected 4 "),
        ((4, 0.5), (4, 0.25), "caat.sync_fraction: got 0.25, expected 0.5 "),
        ((4, 0.5), (1, 1.0), "caat.lanes: got 1, expected 4 "),
        ((1, 1.0), (4, 1.0), "caat.lanes: got 4, expected 1 "),
    ],
)
def test_another_model_may_be_loaded_but_not_other_lanes(
    stored: tuple[int, float], here: tuple[int, float], line: str
) -> None:
    there, new = (
        model_fingerprint(tiny_args("full", lanes=lanes, sync_fraction=fraction))
        for lanes, fraction in (stored, here)
    )
    check_fingerprint(as_json(there), there | {"model.name": "llama_svd"}, "step-4", True)
    with pytest.raises(ConfigError) as error:
        check_fingerprint(as_json(there), new | {"model.name": "llama_svd"}, "step-4", True)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_what_changes_no_function_may_differ() -> None:
    stored = as_json(model_fingerprint(tiny_args("cola")))
    for changes in ({"max_seq_len": 64}, {"init_seed": 3}, {"n_kv_heads": 4}):
        check_fingerprint(stored, model_fingerprint(tiny_args("cola", **changes)), "step-4")


def test_every_value_of_a_model_is_told_or_known_to_be_harmless() -> None:
    told = model_fingerprint(tiny_args("lax"))
    names = {"family"} | told["model.flavor"].keys() | {key.partition(".")[2] for key in told}
    harmless = {"max_seq_len", "init_seed", "backward_sum", "_enforced"}
    fields = {field.name for field in dataclasses.fields(LlamaArgs)}
    assert fields - names == harmless


def test_a_tokenizer_is_its_file(tmp_path: Path) -> None:
    here = tokenizer_digest(ASSETS)
    assert re.fullmatch("sha256:[0-9a-f]{16}", here)
    assert tokenizer_digest(str(tmp_path)) == ""
    copy = tmp_path / "tokenizer.json"
    shutil.copy(ROOT / ASSETS / copy.name, copy)
    assert tokenizer_digest(str(tmp_path)) == here
    copy.write_text(copy.read_text() + " ")
    assert tokenizer_digest(str(tmp_path)) != here


@pytest.mark.parametrize("content", ["{", "[]", "\ud83d"])
def test_an_unreadable_configuration_is_left_to_the_tokenizer(tmp_path: Path, content: str) -> None:
    shutil.copy(ROOT / ASSETS / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content.encode(errors="surrogatepass"))
    assert tokenizer_digest(str(tmp_path)) == tokenizer_digest(ASSETS) != ""
