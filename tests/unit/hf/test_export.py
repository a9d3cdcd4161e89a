# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The command `export`: refusals, precision, a model of the Hub."""

import json

import pytest
import torch
from huggingface_hub import constants as hf_constants
from safetensors.torch import load_file

from tests.commands import Command
from tests.support.run_folders import export, rewrite_record, write_run
from torchtitan_lr.checkpoints.record import read_step
from torchtitan_lr.checkpoints.saving import write_record

# DCP says so when it saves without a process group, which is the point here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("option", "dtype"), [([], "bfloat16"), (["--dtype", "float32"], "float32")]
)
def test_precision_of_the_export(tmp_path, option, dtype):
    step, _ = write_run(tmp_path / "run", "svd", torch.bfloat16)
    assert export.main([str(step), str(tmp_path / "out"), *option]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(v.dtype) for v in weights.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_what_transformers_cannot_run_is_refused(tmp_path, capsys):
    step, _ = write_run(tmp_path / "run", "full")
    out = tmp_path / "out"
    told = export.refusal(capsys, step, out, "--keep_factors")
    assert told.startswith("error: --keep_factors: got 'llama_full', expected a low-r")
    # Of a family that the exported code has no linears for: tests/unit/parallel/test_toys.py.
    changed = dict(read_step(step).run)
    changed["model"]["vocab_size"] = 64
    rewrite_record(step, changed)
    assert "a tokenizer within the model's" in export.refusal(capsys, step, out)
    assert not out.exists()


def test_damage_is_refused(tmp_path, capsys):
    step, _ = write_run(tmp_path / "run", "cola")
    (shard,) = step.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:1000])
    line = export.refusal(capsys, step, tmp_path / "out")
    assert "found: __0_0.distcp has 1000 bytes instead of " in line
    whole = (step / ".metadata").read_bytes()
    for text in (b"not a pickle", whole[: len(whole) // 2], b""):
        (step / ".metadata").write_bytes(text)
        write_record(step, read_step(step))
        assert ".metadata cannot be read (" in export.refusal(capsys, step, tmp_path / "out")
    rewrite_record(step, {"model": {}})
    assert "the complete record of a run" in export.refusal(capsys, step, tmp_path / "out")
    (step / "step.json").unlink()
    assert "step.json is missing" in export.refusal(capsys, step, tmp_path / "out")


def test_a_model_of_the_hub_is_imported_by_its_name(tmp_path, monkeypatch):
    """From a mirror in the cache."""
    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--small" / "snapshots" / "0123"
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text("0123")
    dense, _ = write_run(tmp_path / "dense", "full")
    assert export.main([str(dense), str(snapshot)]) == 0
    monkeypatch.setattr(hf_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf_constants, "HF_HUB_CACHE", str(hub))
    assert Command("import").main(["someone/small", str(tmp_path / "base")]) == 0
