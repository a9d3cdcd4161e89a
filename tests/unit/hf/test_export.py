# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The command `export`: refusals, precision, a model of the Hub.

Exports, read by ``evaluate`` and ``generate``, and judged by transformers.
"""

import copy
import json
from functools import partial

import pytest
import torch
from huggingface_hub import constants as hf_constants
from safetensors.torch import load_file

from tests.commands import Command
from tests.support.corpora import write_jsonl
from tests.support.nightly import nightly
from tests.support.run_folders import export, loaded, model_in, rewrite_record, write_run
from tests.unit.tiny_trainer import history, parameters, tiny_trainer
from torchtitan_lr.checkpoints.record import read_step
from torchtitan_lr.checkpoints.saving import write_record
from torchtitan_lr.console.log import console
from torchtitan_lr.training.history import TRAIN_COMMON

evaluate, generate = Command("evaluate"), Command("generate")

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
    # Of a family that the exported code has no linears for: tests/unit/hf/test_strangers.py.
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


def test_of_a_step_inside_an_interval_is_the_common_model(tmp_path, caplog):
    caplog.set_level("INFO", console.name)
    options = "--outer.every=3 --training.steps=6 --training.max_skipped_steps=1 "
    options += "--checkpoint.enable --checkpoint.interval=5 --lr_scheduler.warmup_steps=0"
    with tiny_trainer(tmp_path / "run", *options.split(), exact=False) as trainer:
        (model,), manager, saved = trainer.model_parts, trainer.checkpointer, []
        held = partial(parameters, model), partial(copy.deepcopy, trainer.outer.common)
        manager.before_save = lambda: saved.extend(copied() for copied in held)
        model.register_forward_hook(lambda *of: of[-1] * torch.nan if trainer.step == 4 else None)
        trainer.train()
        step, out = tmp_path / "run/checkpoint/step-5", tmp_path / "out"
        assert export.main([str(step), str(out), "--keep_factors"]) == 0
        read = [model_in(out), loaded(step)[0]]  # `generate` has the latter
    own, common = saved[:2]
    for found in map(parameters, read):
        assert all(value.equal(common[name]) for name, value in found.items())
        assert not any(value.equal(own[name]) for name, value in found.items())
    # Step 3 ended with an exchange, and step 4 is left out.
    assert [record[TRAIN_COMMON] for record in history(trainer)] == [1, 0, 0, 1, 1, 0]
    assert "outer steps: one replica, which sends nothing, steps every 3 steps" in caplog.text


TEXTS = ["import os\n\n\ndef café(x):\n    return x + 1\n" * 7, "x = 1\n", "class A:\n" * 40]
SEQ_LEN = 48


def judge(capsys, model, texts, *options):
    usual = ["--corpus", "local", "--path", texts, "--seq_len", SEQ_LEN, "--device", "cpu"]
    status = evaluate.main([str(part) for part in (model, *usual, "--json", *options)])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def transformers_loss(folder, dtype):
    """The mean of transformers' own losses over the windows, weighted by their tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": True, "torch_dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stream = [i for text in TEXTS for i in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    total = 0.0
    for start in range(0, len(stream) - 1, SEQ_LEN):
        window = torch.tensor([stream[start : start + SEQ_LEN + 1]])
        with torch.no_grad():
            total += model(window, labels=window).loss.item() * (window.shape[1] - 1)
    return total / (len(stream) - 1), len(stream) - 1


@pytest.mark.parametrize("family", ["svd", "lax", *nightly("full", "cola")])
@pytest.mark.usefixtures("code_cache")
def test_exports_are_evaluated_and_continued(family, tmp_path, capsys):
    texts = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    step, _ = write_run(tmp_path / "run", family, torch.float64)
    out = tmp_path / "out"
    assert export.main([str(step), str(out)]) == 0
    capsys.readouterr()
    expected, found = judge(capsys, step, texts), judge(capsys, out, texts)
    tolerance = 1e-12 if family == "svd" else 1e-13  # its factors are multiplied, which rounds
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    for key in ("tokens", "bytes", "documents"):
        assert found[key] == expected[key]
    options = ["--prompt", "import os", "--temperature", "0", "--max_new_tokens", "6", "--json"]
    answers = []
    for folder in (step, out):
        assert generate.main([str(folder), *options, "--device", "cpu"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["text"])
    assert answers[0] == answers[1]
    loss, tokens = transformers_loss(out, torch.float64)
    assert tokens == found["tokens"]
    # transformers' LLaMA has its angles, norms and loss in fp32.
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    # The control: one token more or less per document is another loss.
    fewer = judge(capsys, out, texts, "--documents", 2)
    assert abs(fewer["loss"] - loss) > 1e-5
    # An export has no corpus of its own.
    told = evaluate.refusal(capsys, out, "--device", "cpu")
    assert "an export has no record of its data" in told
