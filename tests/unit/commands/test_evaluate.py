# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``evaluate`` against a loss computed token by token, in fp64."""

import json
import math

import pytest
import torch

from tests.commands import Command
from tests.reference.validation_loss import sequence_losses, token_losses, windows
from tests.support.corpora import write_jsonl
from tests.support.run_folders import loaded, rewrite_record, run_record, write_run
from torchtitan_lr.data.sources import Reader, Source

command = Command("evaluate").ask

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TEXTS = ["import os\n\n\ndef café(x):\n    return x + 1\n" * 9, "x = 1\n", "", "class A:\n" * 40]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_bos=True, add_eos=True)


def by_hand(step, texts, seq_len):
    """Sum of losses and number of tokens, window by window, without batches and padding."""
    model, tokenizer = loaded(step)
    stream = [token for text in texts for token in encode(tokenizer, text)]
    losses = []
    for start in range(0, len(stream) - 1, seq_len):
        window = torch.tensor(stream[start : start + seq_len + 1])
        with torch.no_grad():
            losses.append(token_losses(model(window[None, :-1])[0], window[1:]))
    losses = torch.cat(losses)
    assert len(losses) == len(stream) - 1
    return losses.sum().item(), len(losses)


@pytest.mark.parametrize("seq_len", [0, 24])
def test_loss_perplexity_and_bits_per_byte(tmp_path, capsys, seq_len):
    step, _ = write_run(tmp_path / "run", "cola", torch.float64)
    texts = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    usual = (step, "--corpus", "local", "--path", texts, "--device", "cpu", "--seq_len", seq_len)
    status, out, _ = command(capsys, *usual, "--json")
    assert status == 0
    found = json.loads(out)
    kept = [text for text in TEXTS if text]
    total, count = by_hand(step, kept, seq_len or 64)
    size = sum(len(text.encode()) for text in kept)
    assert (found["tokens"], found["bytes"], found["documents"]) == (count, size, 3)
    assert found["loss"] == pytest.approx(total / count, rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-12)
    # Another batch size changes no digit that counts; fewer documents change the result.
    for batch in (1, 64):
        again = json.loads(command(capsys, *usual, "--json", "--batch_size", batch)[1])
        assert again["loss"] == pytest.approx(found["loss"], rel=1e-12)
    fewer = json.loads(command(capsys, *usual, "--json", "--documents", 1)[1])
    assert fewer["loss"] == pytest.approx(
        by_hand(step, kept[:1], seq_len or 64)[0] / fewer["tokens"]
    )
    assert abs(fewer["loss"] - found["loss"]) > 1e-6
    text = command(capsys, *usual)[1]
    assert f"loss                 {total / count:.4f}\n" in text
    assert f"bits per byte        {found['bits_per_byte']:.4f}\n" in text


def test_the_number_of_validation_is_repeated(small_library, tmp_path, capsys):
    step, model = write_run(tmp_path, "svd", torch.float64)
    record = run_record("svd")
    record["training"] |= {"dataset": "python_stdlib", "dataset_path": None}
    record["validation"] = {"dataset": "training", "dataset_path": None, "seq_len": 48}
    workers = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    record["validation"] |= {"steps": -1, "local_batch_size": 4, "dataloader": workers}
    rewrite_record(step, record)
    found = json.loads(command(capsys, step, "--json", "--device", "cpu")[1])
    _, tokenizer = loaded(step)
    documents = [encode(tokenizer, text) for text in Reader(Source("python_stdlib")).texts(True)]
    losses = sequence_losses(model.eval(), windows(documents, 48))
    assert found["tokens"] == losses.numel()
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-12)
    assert found["bits_per_byte"] is None
