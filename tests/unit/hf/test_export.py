# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The command `export`: refusals, precision, the model card."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub import constants as hf_constants
from safetensors.torch import load_file

from tests.commands import Command
from tests.support.run_folders import export, rewrite_record, write_run
from torchtitan_lr.checkpoints.record import read_step
from torchtitan_lr.checkpoints.saving import write_record


def refusal(capsys, *argv):
    """The one line on stderr that a refused command prints."""
    status, out, err = export.ask(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    return err


# DCP says so when it saves without a process group, which is the point here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("option", "dtype"), [([], "bfloat16"), (["--dtype", "float32"], "float32")]
)
def test_precision_of_the_export(tmp_path, option, dtype):
    step, _ = write_run(tmp_path / "run", "svd", torch.bfloat16)
    assert export.main([str(step), str(tmp_path / "out"), "--format", "hf", *option]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(v.dtype) for v in weights.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_what_transformers_cannot_run_is_refused(tmp_path, capsys):
    step, _ = write_run(tmp_path / "run", "full")
    out = tmp_path / "out"
    refused = {
        ("--format", "hf", "--keep_factors"): "--keep_factors: got 'llama_full', expected a low-r",
        ("--keep_factors",): "--keep_factors: got 'factored', expected --format hf",
    }
    for options, line in refused.items():
        assert refusal(capsys, step, out, *options).startswith(f"error: {line}")
    # Of a family that the exported code has no linears for: tests/unit/parallel/test_toys.py.
    changed = dict(read_step(step).run)
    changed["model"]["vocab_size"] = 64
    rewrite_record(step, changed)
    assert "a tokenizer within the model's" in refusal(capsys, step, out, "--format", "hf")
    assert not out.exists()


def test_damage_is_refused(tmp_path, capsys):
    step, _ = write_run(tmp_path / "run", "cola")
    (shard,) = step.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:1000])
    line = refusal(capsys, step, tmp_path / "out")
    assert "found: __0_0.distcp has 1000 bytes instead of " in line
    whole = (step / ".metadata").read_bytes()
    for text in (b"not a pickle", whole[: len(whole) // 2], b""):
        (step / ".metadata").write_bytes(text)
        write_record(step, read_step(step))
        assert ".metadata cannot be read (" in refusal(capsys, step, tmp_path / "out")
    rewrite_record(step, {"model": {}})
    assert "the complete record of a run" in refusal(capsys, step, tmp_path / "out")
    (step / "step.json").unlink()
    assert "step.json is missing" in refusal(capsys, step, tmp_path / "out")


def front_matter(folder):
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_the_card_of_a_tune_names_base_and_licence(tmp_path, monkeypatch):
    """An import by its name on the Hub, from a mirror in the cache; a tune; its export."""
    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--small" / "snapshots" / "0123"
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text("0123")
    dense, _ = write_run(tmp_path / "dense", "full")
    assert export.main([str(dense), str(snapshot), "--format", "hf", "--license", "mit"]) == 0
    assert front_matter(snapshot)["license"] == "mit"
    monkeypatch.setattr(hf_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf_constants, "HF_HUB_CACHE", str(hub))
    assert Command("import").main(["someone/small", str(tmp_path / "base")]) == 0

    step, _ = write_run(tmp_path / "tune", "full")
    record = json.loads((tmp_path / "tune" / "job_config.json").read_text())
    record["checkpoint"] = {"initial_load_path": str(tmp_path / "base/checkpoint/step-0")}
    rewrite_record(step, record)
    for form in ("hf", "factored"):
        out = tmp_path / form
        assert export.main([str(step), str(out), "--format", form]) == 0
        card = (out / "README.md").read_text()
        assert "fine-tuned from someone/small with torchtitan_lr" in card
        assert str(tmp_path) not in card
        assert front_matter(out)["base_model"] == "someone/small"
        assert front_matter(out)["license"] == "mit"
    record["checkpoint"] = {"initial_load_path": str(dense)}
    rewrite_record(step, record)
    assert export.main([str(step), str(tmp_path / "again")]) == 0
    card = (tmp_path / "again" / "README.md").read_text()
    assert "fine-tuned from other weights with torchtitan_lr" in card
