# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What goes along with exported weights: the tokenizer, the ids, the model card."""

import json

import pytest
from huggingface_hub import ModelCard
from huggingface_hub import constants as hf_constants

from tests.commands import Command
from tests.support.run_folders import rewrite_record, write_run

export = Command("export")


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
