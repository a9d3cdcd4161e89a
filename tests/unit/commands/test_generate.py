# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import io
import json
import shutil

import pytest
import torch

from tests.commands import ROOT, Command
from tests.support.run_folders import loaded, rewrite_record, run_record, write_run
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checkpoints.saving import write_record
from torchtitan_lr.commands import generate
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.hf.generation import Settings, _Text
from torchtitan_lr.training.loading import find_step

command = Command("generate").ask

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_run_stands_for_its_newest_whole_step(tmp_path, capsys):
    """The newest one with finite weights; in a run without a whole step the line says so."""
    step, _ = write_run(tmp_path, "cola")
    shutil.copytree(step, step.parent / "step-3")
    usual = ("--prompt", "import os", "--max_new_tokens", 5, "--device", "cpu")
    wanted = command(capsys, step, *usual)[1]
    assert command(capsys, tmp_path, *usual)[1] == wanted
    assert find_step(tmp_path) == step and find_step(step) == step
    (data,) = step.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    write_record(step, Record(finite=False))
    assert find_step(tmp_path) == step.parent / "step-3"
    shutil.rmtree(step.parent)
    status, _, err = command(capsys, tmp_path, *usual)
    assert status == 2 and "a run with a complete checkpoint" in err and err.count("\n") == 1


def greedy(model, ids, number):
    """The most likely tokens by the trainer's own forward of the whole sequence."""
    ids, start = list(ids), len(ids)
    for _ in range(number):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[start:]


@pytest.mark.parametrize("family", ["full", "svd", "lax"])
def test_greedy_tokens_are_those_of_the_trainers_model(tmp_path, capsys, family):
    step, _ = write_run(tmp_path, family, torch.float64)
    model, tokenizer = loaded(step)
    ids = tokenizer.encode("import os", add_bos=True)
    usual = ("--prompt", "import os", "--max_new_tokens", 12, "--temperature", 0, "--json")
    said = json.loads(command(capsys, step, *usual, "--device", "cpu")[1])
    wanted = greedy(model, ids, 12)
    assert len(set(wanted)) > 3
    assert said["text"] == "import os" + tokenizer.decode(wanted)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", ["", TEMPLATE])
def test_a_chat_continues_the_tokens_of_training(tmp_path, capsys, monkeypatch, template):
    """Each answer is what the model says to the rendered conversation so far, token by token."""
    step, _ = write_run(tmp_path, "cola", torch.float64)
    assets = tmp_path / "assets"
    shutil.copytree(ROOT / "torchtitan_lr/data/assets/bpe4k", assets)
    if template:
        (assets / "chat_template.jinja").write_text(template)
    record = run_record("cola")
    record["model"]["hf_assets_path"] = str(assets)
    rewrite_record(step, record)
    questions = ["a b", "", "def f", "and x"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions) + "\n"))
    options = ("--chat", "--temperature", 0, "--max_new_tokens", 4, "--device", "cpu")
    status, out, err = command(capsys, tmp_path, *options)
    assert (status, err) == (0, "")
    model, tokenizer = loaded(step)
    text, wanted = "", []
    for index, question in enumerate(q for q in questions if q):
        if template:
            text += f"<user>{question}<|end_of_text|><assistant>"
        else:
            text += f"{chr(10) * 2 if index else ''}### User:\n{question}\n\n### Assistant:\n"
        ids = rendered(tokenizer, text, begins=not template)
        new = greedy(model, ids, 4)
        new = new[: new.index(tokenizer.eos_id)] if tokenizer.eos_id in new else new
        wanted.append(tokenizer.decode(new))
        text += wanted[-1] + "<|end_of_text|>"
    assert out == "".join(f"{answer}\n" for answer in wanted)


def rendered(tokenizer, text, begins):
    """Tokens of a rendered chat; without a template BOS begins every stretch up to an EOS."""
    ids = []
    for number, part in enumerate(text.split("<|end_of_text|>")):
        ids += [tokenizer.eos_id] if number else []
        ids += tokenizer.encode(part, add_bos=begins and not number, add_eos=False)
    return ids


def test_a_chat_ends_where_the_window_ends(tmp_path, capsys, monkeypatch):
    """Fifty messages in a window of 64 tokens: only the first ones have an answer."""
    write_run(tmp_path, "cola")
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"message {i}\n" for i in range(50))))
    status, out, err = command(capsys, tmp_path, "--chat", "--max_new_tokens", 8, "--device", "cpu")
    assert status == 2 and out and err.count("\n") == 1
    assert err.startswith("error: message: got ") and "expected from 1 to 64 tokens" in err


def test_prompts_are_continued_in_order(tmp_path, capsys):
    step, _ = write_run(tmp_path / "run", "cola", torch.float64)
    texts = ["import os", "def main(argv):\n    return", "x", "class A: pass"]
    usual = (step, "--device", "cpu", "--max_new_tokens", 6)
    prompts = [f"--prompt={text}" for text in texts]
    status, said, err = command(capsys, *usual, "--seed", 4, *prompts, "--json")
    found = [json.loads(line) for line in said.splitlines()]
    assert (status, err) == (0, "")
    assert [record["prompt"] for record in found] == texts
    # Each is what the prompt alone gives, with the next seed.
    for index, record in enumerate(found):
        alone = command(capsys, *usual, "--seed", 4 + index, prompts[index])[1]
        assert alone == record["text"] + "\n"
        assert record["end"] == "length" and record["new_tokens"] == 6
    assert command(capsys, *usual, "--seed", 5, prompts[0])[1] != found[0]["text"] + "\n"
    continuation = found[0]["text"].removeprefix(texts[0])
    middle = continuation[len(continuation) // 2 :][:3]
    cut = command(capsys, *usual, "--seed", 4, prompts[0], "--stop", middle, "--json")[1]
    assert json.loads(cut)["end"] == "stop_string"
    assert json.loads(cut)["text"] == texts[0] + continuation[: continuation.index(middle)]


TEXT = "    for café in naïve 🚀🚀:\n\n\treturn 一二三\n"


def pieces(tokenizer, ids, stops=()):
    """What is written token by token behind a prompt, and what is found in the end."""
    prompt, said = tokenizer.encode("def main():\n"), []
    text = _Text(tokenizer, prompt, Settings(stops=stops), said.append)
    for number in range(1, len(ids) + 1):
        if text(torch.tensor([prompt + ids[:number]]), None):
            break
    text.give(len(text.found.text))
    return said, text.found


def test_pieces_make_up_the_text(tmp_path):
    tokenizer = loaded(write_run(tmp_path, "cola")[0])[1]
    ids = tokenizer.encode(TEXT)
    said, found = pieces(tokenizer, ids)
    assert "".join(said) == TEXT == found.text and found.end == "length"
    assert not any("\ufffd" in piece for piece in said) and len(said) > 10
    # The control: a character of several tokens is whole, though its tokens alone are not.
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)
    half = tokenizer.encode("a🚀")[:-1]  # given out at the end
    assert "".join(pieces(tokenizer, half)[0]) == "a\ufffd"
    # A stop string that begins in the prompt is none.
    assert pieces(tokenizer, tokenizer.encode("\nx"), ["\n\n"])[1].text == "\nx"
    for stop in ["\n\n", "café", "🚀", "in na", "\treturn 一二"]:
        said, found = pieces(tokenizer, ids, ["never", stop])
        assert "".join(said) == found.text == TEXT[: TEXT.index(stop)]
        assert found.end == "stop_string"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "def a(\nimport os\n"),
        ("a.txt", "\ufeffdef a(\r\nimport os\r\n\r\n"),
        ("a.jsonl", '\ufeff{"prompt": "def a("}\r\n{"prompt": "import os"}\r\n'),
    ],
)
def test_a_file_of_prompts_from_any_editor(name, content, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    assert generate.read_prompts(tmp_path / name) == ["def a(", "import os"]
    (tmp_path / name).write_text('{"prompt": "lone \\ud83d"}' if name == "a.jsonl" else "\n")
    with pytest.raises((ConfigError, DataError), match="--prompts"):
        generate.read_prompts(tmp_path / name)
