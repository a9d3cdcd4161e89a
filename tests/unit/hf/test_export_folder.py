# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What goes along with exported weights: the tokenizer, the ids, the model card."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub import constants as hf_constants

from tests.commands import Command
from tests.support.run_folders import rewrite_record, write_run

export = Command("export")


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_with_history(folder):
    step, _ = write_run(folder, "cola", torch.bfloat16)
    record = json.loads((folder / "job_config.json").read_text())
    record["training"] |= {"dataset": "python_stdlib", "dataset_path": None}
    record["training"] |= {"steps": 30, "mixture": [{"dataset": "cpython", "weight": 2.0}]}
    rewrite_record(step, record)
    history = [
        {"step": 10, "validation_metrics/loss": 800.0},
        {"step": 20, "loss_metrics/global_avg_loss": 3.25, "n_tokens_seen": 40960}
        | {"throughput/tokens_per_s": 4e3 / 3, "throughput/tokens_per_s_per_device": 1e3 / 3},
        {"step": 30, "validation_metrics/loss": 3.0, "n_tokens_seen": 61440},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history))
    return step


def test_the_card_says_what_the_run_recorded(tmp_path):
    step = run_with_history(tmp_path / "run")
    out = tmp_path / "out"
    assert export.main([str(step), str(out), "--format", "hf"]) == 0
    card = (out / "README.md").read_text()
    for line in (
        "# llama_cola debug, step 20",
        "| tokens | 40,960 |",
        "| training loss at step 20 | 3.2500 nats per token, perplexity 25.79 |",
        "| validation loss at step 10 | 800.0000 nats per token, perplexity inf |",
        "| ranks of attention, feed-forward | 32, 32 |",
        "| data | cpython |",
    ):
        assert line in card.splitlines()
    assert ", pre-trained with torchtitan_lr." in card
    assert "61,440" not in card and card.count("trust_remote_code=True") == 1
    values = json.loads((out / "config.json").read_text())
    assert values["torch_dtype"] == "bfloat16" and values["eos_token_id"] == 1
    # A row of padding would have no gradient in transformers' embedding.
    assert "pad_token_id" not in values


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
