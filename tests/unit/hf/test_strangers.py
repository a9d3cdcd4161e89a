# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Somebody else's run is data: it chooses no code, no network and no place to read or write."""

import json
import socket
import sys

import pytest
from huggingface_hub import ModelCard

from tests.commands import Command
from tests.support.run_folders import rewrite_record, write_run
from torchtitan_lr.commands.generate import _print
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.titan.specs import REGISTERED_SPECS
from torchtitan_lr.training.loading import build_model_args, find_step, read_run_config

generate, export, evaluate = Command("generate"), Command("export"), Command("evaluate")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CORPORA = {"training": {"dataset": "cpython"}, "validation": {"dataset": "training"}}
KEY = "experimental.custom_import"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", "cola")[0]


def change(step, changes):
    """Write values, by section and key, into the record of a step's run."""
    path = step.parent.parent / "job_config.json"
    record = json.loads(path.read_text())
    for section, table in changes.items():
        old = record.get(section)
        record[section] = old | table if isinstance(table, dict) and old else table
    rewrite_record(step, record)


@pytest.mark.parametrize("changes", [{}, {"model": {"name": "llama_other"}}], ids=str)
def test_a_record_imports_nothing(run, tmp_path, monkeypatch, changes):
    package = tmp_path / "path" / "stranger_above"
    package.mkdir(parents=True)
    for name in ("__init__", "code"):
        (package / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')")
    monkeypatch.syspath_prepend(package.parent)
    change(run, CORPORA)
    change(run, {"experimental": {"custom_import": "stranger_above.code"}} | changes)
    try:
        build_model_args(read_run_config(run))
    except ConfigError as error:
        assert "other" in str(error) and f"--{KEY}=MODULE" in str(error)
    assert "stranger_above" not in sys.modules
    assert not (tmp_path / "__init__").exists() and not (tmp_path / "code").exists()


@pytest.fixture
def toy(tmp_path):
    """A run of a family from outside the package, which no import has made known."""
    import tests.toy_family  # noqa: F401

    step = write_run(tmp_path / "toy", "tanh")[0]
    forget()
    yield step
    forget()


def forget():
    sys.modules.pop("tests.toy_family", None)
    for table in (FAMILIES, FLAVORS):
        table.pop("tanh", None)
    REGISTERED_SPECS.pop("llama_tanh", None)


def test_the_command_line_names_the_module_of_a_family(toy, tmp_path, capsys):
    module, text = f"--{KEY}=tests.toy_family", tmp_path / "a.txt"
    text.write_text("def main():\n    return 1\n" * 40)
    corpus = ("--corpus", "local", "--path", text, "--json", "--device", "cpu")
    status, said, _ = evaluate.ask(capsys, toy, *corpus, module)
    assert status == 0 and json.loads(said)["loss"] > 1
    forget()
    for ask, arguments, why in (
        (evaluate, [*corpus], f"--{KEY}=MODULE"),
        (evaluate, [*corpus, f"--{KEY}=no.such.module"], f"error: {KEY}: got 'no.such.module'"),
        (generate, ["--prompt", "a", module], "llama_tanh"),
        (export, [tmp_path / "out", module], "llama_tanh"),
    ):
        assert why in ask.refusal(capsys, toy, *arguments)
        forget()


@pytest.mark.parametrize("folder", ["/etc", "../elsewhere", "", 5])
def test_a_record_leads_to_no_other_folder_of_steps(run, folder):
    change(run, {"checkpoint": {"folder": folder}})
    with pytest.raises(ConfigError, match=r"checkpoint\.folder"):
        find_step(run.parents[1])


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture
def library(small_library, tmp_path, monkeypatch):
    """A small python_stdlib, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dataset", ["python_stdlib", "local"])
def test_evaluating_a_run_writes_nowhere(run, library, tmp_path, capsys, dataset):
    kept = tmp_path / "store" / "local-0123456789abcdef0123"
    kept.mkdir(parents=True)
    (kept / "corpus.json").write_text("{}")
    store = {"token_folder": str(tmp_path / "store")}
    text = tmp_path / "a.jsonl"
    text.write_text("".join(f'{{"text": "x = {n} * {n}"}}\n' for n in range(999)))
    store["dataset_path"] = str(text) if dataset == "local" else None
    held_out = {"dataset": "training", "seq_len": 48, "steps": -1}
    change(run, {"training": {"dataset": dataset} | store, "validation": held_out})
    before = tree(tmp_path)
    status, said, told = evaluate.ask(capsys, run, "--json", "--device", "cpu")
    assert status == 0 and json.loads(said)["loss"] > 1, told
    assert tree(tmp_path) == before and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "corpus",
    [{"dataset": "hf", "dataset_path": "stranger/corpus"}, {"dataset": "c4"}],
    ids=lambda corpus: corpus["dataset"],
)
def test_corpora_of_the_hub_are_named_on_the_command_line(
    run, tmp_path, capsys, monkeypatch, corpus
):
    change(run, {"training": corpus, "validation": {"dataset": "training", "seq_len": 48}})
    no_network(monkeypatch)
    before = tree(tmp_path)
    told = evaluate.refusal(capsys, run, "--device", "cpu")
    assert "validation.dataset: got" in told
    assert "--corpus" in told and tree(tmp_path) == before


def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a network was asked for")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_tokenizer_of_the_hub_is_not_downloaded(run, capsys, monkeypatch):
    change(run, {"model": {"hf_assets_path": "hf://stranger/tokenizer"}})
    no_network(monkeypatch)
    for ask, options in ((generate, ["--prompt", "a"]), (evaluate, [])):
        assert "`hf download OWNER/NAME" in ask.refusal(capsys, run, *options)


def test_an_export_publishes_no_place_and_no_html(run, tmp_path):
    html = "<script>alert(1)</script> ![a](http://b) | `c` \x1b[2J"
    places = {
        "job": {"description": f"of /home/me/secret/notes, {html}", "dump_folder": str(tmp_path)},
        "training": {
            "dataset": "local",
            "dataset_path": f"/home/me/{html}.txt",
            "token_folder": "/home/me/tok",
        },
        "validation": {"dataset": "local", "dataset_path": "~/corpora/held_out.txt"},
        "checkpoint": {"initial_load_path": "../../me/checkpoint/step-0"},
        "metrics": {"save_tb_folder": "C:\\\\me\\\\secret\\\\tb"},
        "experimental": {"custom_import": "my.secret"},
    }
    change(run, places)
    out = tmp_path / "out"
    assert export.main([str(run), str(out), "--license", "mit"]) == 0
    card = (out / "README.md").read_text()
    for secret in ("/home", "me/", "secret", "~", str(tmp_path), "..", "\x1b"):
        assert secret not in card.replace("./", "")
    assert "<script" not in card and "![" not in card and " | `" not in card
    assert "fine-tuned from other weights with torchtitan_lr" in card
    assert ModelCard.load(out / "README.md").data.to_dict()["license"] == "mit"


def test_generated_text_reaches_no_terminal_with_controls(capsys):
    _print("a\x1b[2J\x07\r\n\tb\x9b\u202ec é 日本\u3000\u200d")
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\\r\n\tb\\x9b\\u202ec é 日本\u3000\u200d"
