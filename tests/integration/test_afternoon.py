# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A new user's afternoon in a fresh folder: README's run, own text, a stop, a chat."""

import json
import math
import re
import shutil
import signal
import sys

import pytest

from tests.integration import runs

pytestmark = pytest.mark.nightly

COMMAND = [sys.executable, "-m", "torchtitan_lr"]
SHORT = ["--training.steps=4", "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1"]
SHORT += ["--validation.steps=1", "--checkpoint.interval=2"]
OWN = [
    *("--job.dump_folder=outputs/own", "--training.dataset=local", "--training.dataset_path=own"),
    "--training.text_column=content",
    *("--model.hf_assets_path=my_tokenizer", "--model.vocab_size=1024", "--training.seq_len=64"),
    *("--validation.seq_len=64", "--training.steps=12", "--lr_scheduler.warmup_steps=2"),
    *("--metrics.log_freq=1", "--checkpoint.interval=4", "--validation.steps=1"),
]


class Afternoon:
    """Commands in one folder."""

    def __init__(self, folder):
        self.folder = folder

    def do(self, *words, **variables):
        """The stdout of a command that must work."""
        done = runs.run([*COMMAND, *words], cwd=self.folder, **variables)
        assert done.status == 0, (words, done.everything)
        return done.out


@pytest.fixture(scope="module")
def afternoon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("afternoon")
    (folder / "own").mkdir()
    with (folder / "own" / "notes.jsonl").open("w") as file:
        for i in range(400):
            text = f"Note {i}. " + " ".join(
                f"The {i * k % 97}th sample is {i + k}." for k in range(9)
            )
            file.write(json.dumps({"content": text}) + "\n")
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(200):
            chat = [("user", f"What is {i % 10}?"), ("assistant", "yes yes yes")]
            messages = [{"role": role, "content": text} for role, text in chat]
            file.write(json.dumps({"messages": messages}) + "\n")
    return Afternoon(folder)


def test_the_main_job_with_its_steps_cut(afternoon):
    out = afternoon.do("train", "debug_cola", *SHORT)
    loss = float(re.search(r"validation loss +(\S+) nats", out)[1])
    assert 7 < loss < math.log(4096) + 0.5
    assert runs.complete_steps(afternoon.folder / "outputs/debug_cola") == {2, 4}
    assert afternoon.do("generate", "outputs/debug_cola", "--prompt", "def main(").startswith("def")


def test_own_text_own_tokenizer_and_a_stop_in_between(afternoon):
    """Stopped by Ctrl-C and started again, it has the losses of the run that was left alone."""
    words = ("tokenizer", "--corpus", "local", "--path", "own", "--text_column", "content")
    said = afternoon.do(*words, "--vocab_size", "600", "--out", "my_tokenizer")
    assert said.startswith("600 tokens") and "bytes per token" in said
    alone = [*OWN, "--job.dump_folder=outputs/alone"]
    afternoon.do("train", "debug_cola", *alone, NGPU="2")
    started = runs.Process(
        [*COMMAND, "train", "debug_cola", *OWN],
        afternoon.folder,
        NGPU="2",
        **runs.holding("own:step:6"),
    )
    pids = started.wait_for_held(2)
    started.send(signal.SIGINT)
    started.wait_until(lambda: all(runs.is_pending(pid, signal.SIGINT) for pid in pids))
    runs.send_all(pids, signal.SIGCONT)
    assert started.finish().status in (0, 130)
    own = afternoon.folder / "outputs/own"
    assert 12 > max(runs.complete_steps(own)) >= 5
    afternoon.do("train", "debug_cola", *OWN, NGPU="2")
    there, here = (
        runs.exact(runs.history(afternoon.folder / "outputs" / n)) for n in ("alone", "own")
    )
    assert [r for r in here if "loss_metrics/global_avg_loss" in r] == [
        r for r in there if "loss_metrics/global_avg_loss" in r
    ]
    assert len({record.get("loss_metrics/global_avg_loss") for record in there}) > 9


def test_the_export_is_the_model_for_transformers(afternoon):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    afternoon.do("export", "outputs/own", "for_hf", "--format", "hf")
    folder = afternoon.folder / "for_hf"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompt = "Note 7. The"
    batch = tokenizer(prompt, return_tensors="pt")
    theirs = model.generate(**batch, max_new_tokens=8, do_sample=False)[0]
    words = ("generate", "outputs/own", "--prompt", prompt, "--temperature", "0")
    ours = json.loads(afternoon.do(*words, "--max_new_tokens", "8", "--json"))
    assert tokenizer.decode(theirs, skip_special_tokens=True) == ours["text"]


def test_an_import_is_moved_fine_tuned_and_answers(afternoon):
    # By its name on the Hub, from a mirror: Hugging Face's cache.
    snapshot = afternoon.folder / "cache/models--me--notes/snapshots/0123"
    shutil.copytree(afternoon.folder / "for_hf", snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0123")
    mirror = {"HF_HUB_CACHE": str(afternoon.folder / "cache"), "HF_HUB_OFFLINE": "1"}
    words = [*COMMAND, "import", "me/notes", "brought"]
    # Not forked: the library reads these variables when it is imported.
    done = runs.run(words, cwd=afternoon.folder, truly=True, **mirror)
    assert done.status == 0, done.everything
    (afternoon.folder / "brought").rename(afternoon.folder / "moved")
    words = (
        "--training.dataset=local",
        "--training.dataset_path=chats.jsonl",
        "--training.steps=40",
    )
    more = ("--training.local_batch_size=8", "--lr_scheduler.warmup_steps=2", "--optimizer.lr=5e-3")
    tune = ("train", "moved/train.toml", *words, *more)
    afternoon.do(*tune, NGPU="1")
    (afternoon.folder / "questions.txt").write_text("What is 3?\nWhat is 4?\n")
    said = talk(afternoon, "moved/run")
    assert said == ["yes yes yes"] * 2
    assert talk(afternoon, "outputs/own") != said  # the control: before it was fine-tuned

    # The lines of the export's card run.
    afternoon.do("export", "moved/run", "tuned", "--format", "hf", "--license", "mit")
    card = (afternoon.folder / "tuned/README.md").read_text()
    assert "fine-tuned from me/notes with" in card and "license: mit" in card
    code = card.partition("```python\n")[2].partition("```")[0] + "print(type(model).__name__)"
    done = runs.run([sys.executable, "-c", code], cwd=afternoon.folder / "tuned", truly=True)
    assert done.out.endswith("TorchtitanLRForCausalLM\n"), done.everything


def talk(afternoon, run):
    """Two questions by the terminal, and the answers."""
    shell = 'exec "$0" -m torchtitan_lr generate "$1" --chat --temperature 0 <questions.txt'
    done = runs.run(["bash", "-c", shell, sys.executable, run], cwd=afternoon.folder)
    assert done.status == 0, done.everything
    return done.out.splitlines()
