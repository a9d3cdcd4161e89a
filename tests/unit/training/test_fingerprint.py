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
from torchtitan_lr.checkpoints.record import Record, Start, check_start
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.training.fingerprint import model_fingerprint, tokenizer_digest

ASSETS = "torchtitan_lr/data/assets/bpe4k"

# What the weights do not tell: the changes, and the key that is blamed.
UNSEEN: list[tuple[str, dict[str, Any], str]] = [
    ("svd", {"family": "cola"}, "model.name: got 'llama_cola', expected 'llama_svd' as in a/"),
    ("cola", {"activation": "lowrank"}, "low_rank.activation: got 'lowrank', expected 'both'"),
    ("full", {"n_heads": 8, "n_kv_heads": 8}, "model.n_heads: got 8, expected 4"),
    ("full", {"rope_theta": 5e5}, "model.rope_theta: got 500000.0, expected 10000.0"),
    ("full", {"norm_eps": 1e-5}, "model.norm_eps: got 1e-05"),
    ("full", {"lanes": 2}, "caat.lanes: got 2, expected 1 "),
]


def check(stored: LlamaArgs, here: LlamaArgs) -> None:
    """Compare two models as a start does with a record, which is JSON."""
    record = Record({"model": json.loads(json.dumps(model_fingerprint(stored)))})
    check_start(Start("a/step-4"), record, {"model": model_fingerprint(here)})


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
        check(stored, here)
    assert str(error.value).startswith(line)
    assert "a/step-4" in str(error.value)


def test_every_value_of_a_model_is_told_or_known_to_be_harmless() -> None:
    told = model_fingerprint(tiny_args("lax"))
    names = {"family"} | {key.partition(".")[2] for key in told}
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
