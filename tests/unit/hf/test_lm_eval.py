# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An export in the lm-evaluation-harness: its own model class scores as our model does."""

import json

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager

from tests.reference.validation_loss import token_losses
from tests.support.run_folders import export, loaded, write_run

WORDS = ["os", "def power(x", "return None", "self"]
TEXTS = [f"import sys\nx = {n}\n" for n in range(3)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the task ``next``: which of four words comes next."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.dumps({"text": text, "words": WORDS, "right": 1}) for text in TEXTS]
    (folder / "next.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "next.yaml").write_text(
        "task: next\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/next.jsonl}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: right\ndoc_to_choice: words\n"
        "metric_list: [{metric: acc}]\n"
    )
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("family", ["full", "cola"])
def test_the_harness_reads_an_export(family, tasks, code_cache, tmp_path):
    step, _ = write_run(tmp_path / "run", family)
    assert export.main(["--format", "hf", str(step), str(tmp_path / "out")]) == 0
    found = lm_eval.simple_evaluate(
        model="hf",
        # A dense model is transformers' own LlamaForCausalLM.
        model_args={"pretrained": str(tmp_path / "out"), "trust_remote_code": family != "full"},
        tasks=["next"],
        task_manager=TaskManager(include_path=[str(tasks)], include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    model, tokenizer = loaded(step)
    for text, sample in zip(TEXTS, found["samples"]["next"], strict=True):
        scores = [float(score) for score, _ in sample["filtered_resps"]]
        assert scores == pytest.approx([score(model, tokenizer, text, w) for w in WORDS], rel=1e-5)
        assert len(set(scores)) == len(WORDS)


def score(model, tokenizer, text, word):
    """The log-likelihood of a word behind a text; spaces between them belong to the word."""
    start = len(tokenizer.encode(text.rstrip(), add_bos=True, add_eos=False))
    ids = tokenizer.encode(f"{text} {word}", add_bos=True, add_eos=False)
    with torch.no_grad():
        losses = token_losses(model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]))
    return -losses[start - 1 :].sum().item()
