# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The commands of README, then those of the page Start, in their order in one clone, steps cut."""

import re
import subprocess
import sys

import pytest

from tests.integration import runs
from tests.support.pages import documented

pytestmark = pytest.mark.nightly

SHORT = ["--training.steps=2", "--training.local_batch_size=2", "--lr_scheduler.warmup_steps=1"]
SHORT += ["--validation.steps=1", "--checkpoint.interval=2", "--metrics.log_freq=1"]

# What this machine lacks; every other command must work.
ELSEWHERE = {
    "cola_130m": "C4 is on the Hub",
    "train cola_1b": "needs GPUs",
    "SmolLM2": "is on the Hub",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The end of every command, with its page and words."""
    clone = tmp_path_factory.mktemp("hour") / "clone"
    subprocess.run(["git", "clone", "-q", runs.ROOT, clone], check=True)
    (clone / "data").mkdir()
    # Documents that differ: those held out are chosen by their hash.
    texts = (f"Document {i}. " + f"Sentence {i * 7} of a text. " * 60 for i in range(600))
    (clone / "data" / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    ended = []
    for page in ("README.md", "docs/index.md"):
        for variables, name, words in documented(clone / page):
            if any(reason in f"{name} {' '.join(words)}" for reason in ELSEWHERE):
                continue
            words = [re.sub(r"step-150$", "step-2", word) for word in words]
            start = [sys.executable, "-m", "torchtitan_lr", name]
            if name == "train":
                variables = variables | {"NGPU": str(min(4, int(variables.get("NGPU", 2))))}
                start = [clone / "run_llama_train.sh"]
                words = words + SHORT
            end = runs.run([*start, *words], clone, truly=True, PYTHON=sys.executable, **variables)
            ended.append((page, name, words, end))
    return ended


def test_every_command_of_the_first_hour_works(done):
    assert len(done) > 8
    failed = [(page, name, words, end.everything) for page, name, words, end in done if end.status]
    assert not failed


def test_what_was_trained_already_says_so(done):
    trained = [end.out for page, name, words, end in done if words == SHORT]
    assert "Training starts at step 1" in trained[0]
    assert all("already at step 2 of 2: nothing to train" in out for out in trained[1:])
    assert len(trained) > 1
