# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The first commands of docs/use_a_model.md, one after the other on a small checkpoint."""

import re
import sys

import pytest

from tests.integration import runs
from tests.support.pages import documented

TINY = ["--training.steps=2", "--validation.steps=1", "--training.local_batch_size=1"]
TINY += ["--lr_scheduler.warmup_steps=1", "--checkpoint.interval=2", "--job.dump_folder=tuned"]

# What makes each command short.
SHORTER = {
    "generate": ["--max_new_tokens=8", "--temperature=0"],
    "evaluate": ["--documents=2"],
    "export": [],
    "import": [],
    "train": TINY,
}


@pytest.mark.nightly
def test_the_first_commands_of_the_page(finished, tmp_path):
    here = {"outputs/debug_cola": str(finished.folder), "cpython": "python_stdlib"}
    step = f"--checkpoint.initial_load_path={finished.folder / 'checkpoint' / 'step-6'}"
    said = {}
    for variables, name, words in documented(runs.ROOT / "docs" / "use_a_model.md")[:6]:
        arguments = [here.get(word, word) for word in words] + SHORTER[name]
        arguments += [step] * (name == "train")
        start = [sys.executable, "-m", "torchtitan_lr", name, *arguments]
        end = runs.run(start, cwd=tmp_path, **variables)
        assert end.status == 0, (name, end.everything)
        said.setdefault(name, []).append(end.out)
    assert said.keys() == SHORTER.keys()
    assert said["generate"][0].startswith("def main(") and len(said["generate"][0]) > 12
    # The export is the same model: the same loss on the same two documents.
    one, two = (re.search(r"loss +(\S+)", out)[1] for out in said["evaluate"])
    assert one == two
    assert (tmp_path / "outputs/imported/checkpoint/step-0/.metadata").is_file()
    records = runs.history(tmp_path / "tuned")
    assert [r["step"] for r in records if "loss_metrics/global_avg_loss" in r][-1] == 2
