# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What goes along with exported weights: the tokenizer, the ids, the model card."""

import json
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from huggingface_hub import constants as hf_constants
from tokenizers import Tokenizer, processors

from tests.commands import ROOT, Command
from tests.support.run_folders import rewrite_record, write_run
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.hf.tokenizer import export_tokenizer

ASSETS = ROOT / "torchtitan_lr/data/assets/bpe4k"


TEXTS = [
    "",
    "def main():\n    return 'naïve café'",
    "  x\t\r\n\n 1234567",
    "日本 🙂 don't <|end_of_text|>",
]


def roundtrip(folder, out):
    """The tokenizer of training, and the exported one as transformers loads it."""
    from transformers import AutoTokenizer

    config = SimpleNamespace(model=SimpleNamespace(hf_assets_path=str(folder)))
    ours = build_tokenizer(config)
    out.mkdir()
    export_tokenizer(ours, folder, out, 64)
    return ours, AutoTokenizer.from_pretrained(out)


def same_ids(ours, theirs):
    wanted = [ours.encode(text, add_bos=True, special=True) for text in TEXTS]
    assert theirs(TEXTS).input_ids == wanted
    for ids in wanted:
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(
            ids, skip_special_tokens=True
        )
    return wanted


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
    record["checkpoint"] = {"initial_load_path": str(dense)}
    rewrite_record(step, record)
    assert export.main([str(step), str(tmp_path / "again")]) == 0
    card = (tmp_path / "again" / "README.md").read_text()
    assert "fine-tuned from llama_full debug, step 20 with torchtitan_lr" in card


def test_the_shipped_tokenizer_adds_bos_as_training_did(tmp_path):
    ours, theirs = roundtrip(ASSETS, tmp_path / "out")
    wanted = same_ids(ours, theirs)
    assert all(ids[0] == ours.bos_id and ids.count(ours.bos_id) == 1 for ids in wanted)
    batch = theirs(["a b", "def main(x): pass"], padding=True)
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert batch.attention_mask[0] == [0] * (len(batch.input_ids[1]) - 3) + [1] * 3
    ids = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert ids == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


@pytest.mark.parametrize("kind", ["adds_it_itself", "has_none"])
def test_bos_is_neither_doubled_nor_invented(tmp_path, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    backend = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    config = {"eos_token": "<|end_of_text|>", "add_bos_token": False, "chat_template": "{{ 1 }}"}
    if kind == "adds_it_itself":
        bos = ("<|begin_of_text|>", 0)
        backend.post_processor = processors.TemplateProcessing(
            single=[bos[0], "$A"], special_tokens=[bos]
        )
        config |= {"bos_token": bos[0], "add_bos_token": True}
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = roundtrip(folder, tmp_path / "out")
    wanted = same_ids(ours, theirs)
    assert [ids.count(0) for ids in wanted] == [int(kind == "adds_it_itself")] * len(TEXTS)
    assert theirs.chat_template == "{{ 1 }}"
