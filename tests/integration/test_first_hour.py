# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The commands of README, then those of the page Start, in their order in one clone, steps cut."""

import re
import subprocess
import sys

import pytest

from tests.integration import runs
from tests.support.pages import documented

SHORT = ["--training.steps=2", "--training.local_batch_size=2", "--lr_scheduler.warmup_steps=1"]
SHORT += ["--validation.steps=1", "--checkpoint.interval=2", "--metrics.log_freq=1"]

# What this machine lacks (C4 and a model of the Hub, GPUs); every other command must work.
ELSEWHERE = re.compile("cola_130m|train cola_1b|SmolLM2")


@pytest.mark.nightly
def test_every_command_of_the_first_hour_works(tmp_path):
    clone, again = tmp_path / "clone", []
    subprocess.run(["git", "clone", "-q", runs.ROOT, clone], check=True)
    (clone / "data").mkdir()
    # Documents that differ: those held out are chosen by their hash.
    texts = (f"Document {i}. " + f"Sentence {i * 7} of a text. " * 60 for i in range(600))
    (clone / "data" / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    commands = [*documented(clone / "README.md"), *documented(clone / "docs/index.md")]
    assert len(commands) > 8
    for variables, name, words in commands:
        if ELSEWHERE.search(f"{name} {' '.join(words)}"):
            continue
        words = [re.sub(r"step-150$", "step-2", word) for word in words]
        start = [sys.executable, "-m", "torchtitan_lr", name, *words]
        if name == "train":
            variables = variables | {"NGPU": str(min(4, int(variables.get("NGPU", 2))))}
            start = [clone / "run_llama_train.sh", *words, *SHORT]
        end = runs.run(start, clone, truly=True, PYTHON=sys.executable, **variables)
        assert end.status == 0, (name, words, end.everything)
        if name == "train" and not words:
            again.append(end.out)
    # What was trained already says so.
    assert "Training starts at step 1" in again[0] and len(again) > 1
    assert all("already at step 2 of 2: nothing to train" in out for out in again[1:])
