# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Exports, read by ``evaluate`` and ``generate``, and judged by transformers."""

import json

import pytest
import torch

from tests.commands import Command
from tests.support.corpora import write_jsonl
from tests.support.nightly import nightly
from tests.support.run_folders import export, write_run

evaluate, generate = Command("evaluate"), Command("generate")

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("code_cache"),
]

TEXTS = ["import os\n\n\ndef café(x):\n    return x + 1\n" * 7, "x = 1\n", "class A:\n" * 40]
SEQ_LEN = 48
FAMILIES = ["svd", "lax", *nightly("full", "cola")]


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


@pytest.mark.parametrize("family", FAMILIES)
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
