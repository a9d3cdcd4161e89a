# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The commands of docs/guide.md, "Use the model", run one after the other on a small checkpoint."""

import re
import shlex
import sys

import pytest
import torch

from tests.integration import runs

SECTION = "## Use the model"
CHECKPOINT = "outputs/debug_cola/checkpoint/step-150"
TINY = ["--training.steps=2", "--validation.steps=1", "--training.local_batch_size=1"]
TINY += ["--lr_scheduler.warmup_steps=1", "--checkpoint.interval=2"]

# What makes each command short; a command that is not named here fails the test.
SHORTER = {
    "generate.py": ["--max_new_tokens=8", "--temperature=0"],
    "evaluate.py": ["--documents=2"],
    "export.py": [],
    "import_hf.py": [],
    "run_llama_train.sh": TINY,
}


def guide_commands():
    """The commands of the section as lists of words."""
    text = (runs.ROOT / "docs" / "guide.md").read_text()
    section = text.partition(f"{SECTION}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
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
        program = next(p for p in parts if p.endswith((".py", ".sh")))
        arguments = [step if p == CHECKPOINT else p for p in parts[parts.index(program) + 1 :]]
        arguments += SHORTER[program.rpartition("/")[2]]
        start = [sys.executable, runs.ROOT / program]
        if program.endswith(".sh"):
            start = runs.LAUNCH
            arguments += [f"--checkpoint.initial_load_path={step}", "--job.dump_folder=tuned"]
        ended.append((words, runs.run([*start, *arguments], cwd=base, **variables)))
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
