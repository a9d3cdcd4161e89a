# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tasks of the lm-evaluation-harness: this package's model class against the harness' own."""

import importlib.util
import json
from types import SimpleNamespace

import lm_eval
import pytest
import torch

from tests.commands import Command
from tests.reference.validation_loss import token_losses
from tests.support.run_folders import export, write_run
from torchtitan_lr.hf import harness
from torchtitan_lr.hf.loading import load_for_inference

command = Command("evaluate").ask
WINDOW = 128

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tasks", ","], "--tasks: got '', expected names such as hellaswag"),
        (["--tasks", "a", "--corpus", "c4"], "--corpus: got 'c4', expected no such option"),
        (["--tasks", "a", "--seq_len", "8"], "--seq_len: got 8, expected no such option"),
        (["--tasks", "a", "--task_path", "nowhere"], "--task_path: got 'nowhere'"),
        (["--tasks", "a", "--num_fewshot", "-1"], "--num_fewshot: got -1"),
        (["--num_fewshot", "1"], "--num_fewshot: got '1', expected --tasks beside it"),
        (["--tasks", "a", "--parallelism.tp_plan=btp"], "--tasks: got 'a', expected no --parall"),
    ],
)
def test_refusals(capsys, options, line):
    status, out, err = command(capsys, "step-1", *options)
    assert (status, out) == (2, "") and err.startswith(f"error: {line}") and err.count("\n") == 1


def test_no_tasks_on_the_ranks_of_torchrun(capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    _, _, err = command(capsys, "step-1", "--tasks", "a")
    assert err.startswith("error: --tasks: got 'a', expected one process")


def test_without_the_harness_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, _, err = command(capsys, "step-1", "--tasks", "a")
    assert err == (
        "error: --tasks: got 'a', expected the extra eval: pip install 'torchtitan_lr[eval]'\n"
    )


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    step, _ = write_run(folder, "cola")
    record = json.loads((folder / "job_config.json").read_text())
    record["training"]["seq_len"] = WINDOW
    (folder / "job_config.json").write_text(json.dumps(record))
    return step


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


def test_texts_by_hand(step):
    model, tokenizer = load_for_inference(step)
    model.double()
    adapter = harness.HarnessModel(model, tokenizer, 2)
    text = "def power(x):\n    return x\n" * 20

    def losses(ids):
        with torch.no_grad():
            return token_losses(model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]))

    def encode(text, bos=True):
        return tokenizer.encode(text, add_bos=bos, add_eos=False)

    pairs = [("import", " os\n"), ("x = ", "1"), ("", "import os"), (text, "    pass\n")]
    found = adapter.loglikelihood(requests(*pairs))
    whole = [encode("".join(pair)) for pair in pairs]
    # Spaces at a context's end belong to the continuation; without a context it is BOS.
    starts = [encode("import"), encode("x ="), [tokenizer.bos_id], encode(text.rstrip())]
    for (value, _), ids, start in zip(found, whole, starts, strict=True):
        wanted = losses(ids[-WINDOW - 1 :])[len(start) - len(ids) :].sum().item()
        assert value == pytest.approx(-wanted, rel=1e-12)
    assert len(whole[-1]) > WINDOW + 1  # this one loses its beginning

    ids = encode(text)
    assert WINDOW < len(ids) - 1 < 2 * WINDOW
    (value,) = adapter.loglikelihood_rolling(requests((text,)))
    rest = len(ids) - WINDOW - 1  # scored with a whole window before them
    wanted = losses(ids[: WINDOW + 1]).sum() + losses(ids[-WINDOW - 1 :])[-rest:].sum()
    assert value == pytest.approx(-wanted.item(), rel=1e-12)

    options = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    contexts = ["import os", text]
    for answer, context in zip(
        adapter.generate_until(requests(*[(context, options) for context in contexts])),
        contexts,
        strict=True,
    ):
        ids = encode(context)[-(WINDOW - 6) :]
        start = len(ids)
        for _ in range(6):
            with torch.no_grad():
                ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        assert tokenizer.eos_id not in ids[start:]
        assert answer == tokenizer.decode(ids[start:]).split("\n")[0]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of two sums, and one of four possible next words."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "sums.jsonl").write_text('{"question": "1 + 1 =", "answer": " 2"}\n' * 3)
    (folder / "sums.yaml").write_text(
        "task: sums\noutput_type: loglikelihood\ntest_split: test\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: perplexity}, {metric: acc}]\n"
    )
    words = ["os", "def power(x", "return None", "self"]
    (folder / "next.jsonl").write_text(
        "".join(
            json.dumps({"text": f"import sys\nx = {n}\n", "words": words, "right": n % 4}) + "\n"
            for n in range(12)
        )
    )
    (folder / "next.yaml").write_text(
        "task: next\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/next.jsonl}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: right\ndoc_to_choice: words\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    return folder


def test_it_scores_as_the_harness_own_model_does(step, tasks, code_cache, tmp_path, capsys):
    out = tmp_path / "out"
    assert export.main(["--format", "hf", str(step), str(out)]) == 0
    capsys.readouterr()
    options = {"tasks": ["next"], "task_manager": harness.find_tasks(["next"], tasks)}
    arguments = {"pretrained": str(out), "dtype": "float32", "trust_remote_code": True}
    theirs = lm_eval.simple_evaluate(
        model="hf", model_args=arguments, device="cpu", batch_size=4, **options
    )
    results = []
    for folder in (step, out):
        adapter = harness.HarnessModel(*load_for_inference(folder), 5)
        results.append(lm_eval.simple_evaluate(model=adapter, **options))
    for ours in results:
        for metric in ("acc,none", "acc_norm,none"):
            assert ours["results"]["next"][metric] == theirs["results"]["next"][metric]
        for a, b in zip(*(r["samples"]["next"] for r in (ours, theirs)), strict=True):
            values = [[float(value) for value, _ in s["filtered_resps"]] for s in (a, b)]
            assert values[0] == pytest.approx(values[1], rel=1e-5)
            assert len(set(values[0])) == 4


def test_the_command_with_task_files(step, tasks, capsys):
    usual = (step, "--device", "cpu", "--task_path", tasks)
    status, out, err = command(capsys, *usual, "--tasks", "sums,next", "--documents", 2, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["samples"] == {"sums": 2, "next": 2}
    assert {"perplexity", "acc"} <= found["tasks"]["sums"].keys()
    status, out, err = command(capsys, *usual, "--tasks", "no_such_task")
    assert status == 2 and err.startswith("error: --tasks: got 'no_such_task', expected a task of")
    assert err.count("\n") == 1
    (tasks / "sums.jsonl").unlink()
    status, out, err = command(capsys, *usual, "--tasks", "sums")
    assert status == 2 and err.startswith("error: --tasks: got 'sums', expected tasks whose files")
    assert err.count("\n") == 1
