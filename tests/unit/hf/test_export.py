# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import json
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.support.run_folders import export, rewrite_record, write_run
from tests.unit.tiny import MARGIN, fp32_noise, max_error, tokens
from torchtitan_lr.checkpoints.record import read_step
from torchtitan_lr.checkpoints.saving import write_record
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.flavors import read_model_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.training.loading import load_weights


def refusal(capsys, *argv):
    """The one line on stderr that a refused command prints."""
    status, out, err = export.ask(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    return err


# DCP says so when it saves without a process group, which is the point here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("family", "low_rank"),
    [
        ("full", {}),
        ("svd", {}),
        ("cola", {"rank_attention": 32, "activation": "lowrank"}),
        ("lax", {"lax_gate": "scalar"}),
    ],
)
def test_factored_goes_round(tmp_path, family, low_rank):
    step, model = write_run(tmp_path / "run", family, **low_rank)
    out = tmp_path / "out"
    assert export.main([str(step), str(out)]) == 0
    weights = load_file(out / "model.safetensors")
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # The file says all that is needed to rebuild the model.
    args = read_model_args(out / "model_args.json")
    assert args == model.model_args
    again = LlamaModel(args)
    again.load_state_dict(weights)
    ids = tokens(args)
    assert torch.equal(again(ids), model(ids))


def test_a_step_that_its_run_deletes_meanwhile_is_one_line(tmp_path):
    step, model = write_run(tmp_path / "run", "cola")
    shutil.rmtree(step)
    with pytest.raises(ConfigError, match="no such folder; a run that trains keeps its newest"):
        load_weights(step, model.model_args)


def test_a_full_disk_is_said_in_one_line(tmp_path, capsys):
    step, _ = write_run(tmp_path / "run", "svd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # of each file, in bytes
    try:
        message = refusal(capsys, step, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith(f"error: OUT: got '{tmp_path / 'out'}', expected a writable folder")
    assert not (tmp_path / "out").exists()


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
    shard.unlink()
    assert "__0_0.distcp is missing" in refusal(capsys, step, tmp_path / "out")
    whole = (step / ".metadata").read_bytes()
    for text in (b"not a pickle", whole[: len(whole) // 2], b""):
        (step / ".metadata").write_bytes(text)
        write_record(step, read_step(step))
        assert ".metadata cannot be read (" in refusal(capsys, step, tmp_path / "out")
    rewrite_record(step, {"model": {}})
    assert "the complete record of a run" in refusal(capsys, step, tmp_path / "out")
    (step / "step.json").unlink()
    assert "step.json is missing" in refusal(capsys, step, tmp_path / "out")


@pytest.mark.parametrize("family", ["full", "svd"])
def test_transformers_loads_the_hf_export(tmp_path, family):
    step, model = write_run(tmp_path / "run", family)
    from transformers import LlamaForCausalLM

    out = tmp_path / "out"
    assert export.main([str(step), str(out), "--format", "hf"]) == 0
    theirs = LlamaForCausalLM.from_pretrained(out).eval()
    ids = tokens(model.model_args, s=48)
    with torch.no_grad():
        expected, logits = model(ids), theirs(ids).logits
    assert max_error(logits, expected) < MARGIN * fp32_noise(model, ids)
    # Negative control: the same architecture with other weights is not as close.
    with torch.no_grad():
        other = LlamaForCausalLM(theirs.config)(ids).logits
    assert max_error(other, expected) > 1e-2
