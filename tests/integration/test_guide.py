# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The first commands of docs/use_a_model.md, one after the other on a small checkpoint."""

import re
import shlex
import sys

import pytest
import torch

from tests.integration import runs

RUN = "outputs/debug_cola"
TINY = ["--training.steps=2", "--validation.steps=1", "--training.local_batch_size=1"]
TINY += ["--lr_scheduler.warmup_steps=1", "--checkpoint.interval=2"]

# What makes each command short; a command that is not named here fails the test.
SHORTER = {
    "generate": ["--max_new_tokens=8", "--temperature=0"],
    "evaluate": ["--documents=2"],
    "export": [],
    "import": [],
    "train": TINY,
}


def guide_commands():
    """The commands of the page's first block as lists of words."""
    text = (runs.ROOT / "docs" / "use_a_model.md").read_text()
    block = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0]
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@pytest.fixture(scope="module")
def done(finished, tmp_path_factory):
    """Each command's end, by its words; all in one folder."""
    base = tmp_path_factory.mktemp("guide")
    step = str(finished.folder / "checkpoint" / "step-6")
    ended = []
    for words in guide_commands():
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        parts = words[len(variables) :]
        assert parts[0] == "torchtitan-lr"
        here = {RUN: str(finished.folder), "cpython": "python_stdlib"}  # what the run trained on
        arguments = [here.get(part, part) for part in parts[1:]] + SHORTER[parts[1]]
        if parts[1] == "train":
            arguments += [f"--checkpoint.initial_load_path={step}", "--job.dump_folder=tuned"]
        start = [sys.executable, "-m", "torchtitan_lr", *arguments]
        ended.append((words, runs.run(start, cwd=base, **variables)))
    return base, ended


def test_every_command_works(done):
    _, ended = done
    assert len(ended) == 6
    for words, end in ended:
        assert end.status == 0, (words, end.everything)


def outputs_of(done, name):
    return [end.out for words, end in done[1] if any(name in word for word in words)]


def test_their_results(done):
    base, _ = done
    (text,) = outputs_of(done, "generate")
    assert text.startswith("def main(") and len(text) > len("def main(\n")
    # The export is the same model: the same loss on the same two documents.
    losses = [re.search(r"loss +(\S+) nats", out)[1] for out in outputs_of(done, "evaluate")]
    assert len(losses) == 2 and losses[0] == losses[1]
    assert (base / "outputs/imported/checkpoint/step-0/.metadata").is_file()
    records = runs.history(base / "tuned")
    assert [r["step"] for r in records if "loss_metrics/global_avg_loss" in r][-1] == 2
    # Where the export and the import leave the weights: a control that they hold numbers.
    from safetensors.torch import load_file

    weights = load_file(base / "for_hf" / "model.safetensors")
    assert all(torch.isfinite(w).all() and w.std() > 0 for w in weights.values() if w.dim() == 2)
