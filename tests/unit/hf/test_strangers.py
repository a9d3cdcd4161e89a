# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Somebody else's run is data: it chooses no code, no network and no place to read or write."""

import json
import socket
import sys

import pytest

from tests.commands import Command
from tests.support.run_folders import write_run
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.card import run_toml
from torchtitan_lr.hf.loading import find_step, read_job_config, read_record, read_run_config
from torchtitan_lr.hf.ranks import build_config
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.titan.specs import REGISTERED_SPECS

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
    path.write_text(json.dumps(record))


WAYS = {
    "one process": lambda step: read_run_config(step),
    "evaluate": lambda step: read_job_config(step),
    "ranks": lambda step: build_config(step, None, [], 1, "cpu"),
    "card": run_toml,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"name": "llama_other"}},
        {"parallelism": {"tp_plan": "other"}},
        {"activation_checkpoint": {"mode": "other"}},
        {"job": {"custom_config_module": "stranger_above.code"}},
    ],
    ids=str,
)
def test_a_record_imports_nothing(run, tmp_path, monkeypatch, way, changes):
    package = tmp_path / "path" / "stranger_above"
    package.mkdir(parents=True)
    for name in ("__init__", "code"):
        (package / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')")
    monkeypatch.syspath_prepend(package.parent)
    change(run, CORPORA)
    change(run, {"experimental": {"custom_import": "stranger_above.code"}} | changes)
    try:
        WAYS[way](run)
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
    prompt = ("--prompt", "import os", "--max_new_tokens", 2, "--device", "cpu")
    status, _, told = generate.ask(capsys, toy, *prompt)
    assert status == 2 and told.count("\n") == 1
    assert "model.name: got 'llama_tanh'" in told and f"--{KEY}=MODULE" in told
    module = f"--{KEY}=tests.toy_family"
    assert generate.ask(capsys, toy, *prompt, module)[0] == 0
    forget()
    assert export.ask(capsys, toy, tmp_path / "out", module)[0] == 0
    forget()
    text = tmp_path / "a.txt"
    text.write_text("def main():\n    return 1\n" * 40)
    corpus = ("--corpus", "local", "--path", text, "--json", "--device", "cpu")
    losses = []
    for model in (toy, tmp_path / "out"):
        status, said, _ = evaluate.ask(capsys, model, *corpus, module)
        assert status == 0
        losses.append(json.loads(said)["loss"])
        forget()
    assert losses[0] == losses[1]
    status, _, told = generate.ask(capsys, tmp_path / "out", *prompt)
    assert status == 2 and f"--{KEY}=MODULE" in told and told.count("\n") == 1
    status, _, told = generate.ask(capsys, toy, *prompt, f"--{KEY}=no.such.module")
    assert status == 2 and told.startswith(f"error: {KEY}: got 'no.such.module'")


@pytest.mark.parametrize("folder", ["/etc", "../elsewhere", "", 5])
def test_a_record_leads_to_no_other_folder_of_steps(run, folder):
    change(run, {"checkpoint": {"folder": folder}})
    with pytest.raises(ConfigError, match=r"checkpoint\.folder"):
        find_step(run.parents[1])


def test_linked_folders_are_the_users_own(run, tmp_path):
    """The folder of all steps is a link, or a step is one, from beside the run."""
    run.parent.rename(tmp_path / "big")
    run.parent.symlink_to(tmp_path / "big")
    assert find_step(run.parents[1]) == run
    assert read_record(run)["model"]["name"] == "llama_cola"
    run.parent.unlink()
    (tmp_path / "big").rename(run.parent)
    (tmp_path / "best").symlink_to(run)
    assert read_record(tmp_path / "best")["model"]["name"] == "llama_cola"


SECTIONS = ["model", "training", "low_rank", "parallelism", "debug"]
VALUES = [
    *("model.name", "model.flavor", "model.hf_assets_path", "model.vocab_size"),
    *("training.seq_len", "low_rank.rank", "low_rank.activation", "debug.seed"),
]


@pytest.mark.parametrize("place", SECTIONS + VALUES)
@pytest.mark.parametrize("wrong", [[], 1.5, True, "x" * 3000], ids=["list", "1.5", "true", "long"])
def test_a_value_of_another_type_is_refused_in_one_line(run, place, wrong, capsys):
    section, _, name = place.partition(".")
    change(run, {section: {name: wrong} if name else wrong})
    prompt = ("--prompt", "a", "--max_new_tokens", 1, "--device", "cpu")
    status, _, told = generate.ask(capsys, run, *prompt)
    assert status == 2, told
    assert told.startswith("error: ") and told.count("\n") == 1 and len(told) < 2000


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture
def library(small_library, tmp_path, monkeypatch):
    """A small corpus that needs no path, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return "python_stdlib"


def test_evaluating_a_run_writes_nowhere(run, library, tmp_path, capsys):
    """Of a record with a store of a limit 0: other corpora were deleted from it."""
    kept = tmp_path / "store" / "local-0123456789abcdef0123"
    kept.mkdir(parents=True)
    (kept / "corpus.json").write_text("{}")
    (tmp_path / "store" / "locks").mkdir()
    (tmp_path / "store" / "locks" / kept.name).write_text("")
    store = {"token_folder": str(tmp_path / "store"), "token_folder_gb": 0.0}
    held_out = {"dataset": "training", "seq_len": 48, "steps": -1}
    change(run, {"training": {"dataset": library} | store, "validation": held_out})
    before = tree(tmp_path)
    losses = []
    for options in ([], ["--as_validated"]):
        status, said, told = evaluate.ask(capsys, run, "--json", "--device", "cpu", *options)
        assert status == 0, told
        losses.append(json.loads(said)["loss"])
    assert tree(tmp_path) == before and not (tmp_path / "cache").exists()
    # Tokens that are there are used.
    toml = tmp_path / "run.toml"
    toml.write_text(run_toml(run).replace("token_folder_gb = 0.0", "token_folder_gb = 9.0"))
    assert evaluate.ask(capsys, run, "--config", toml, "--json", "--device", "cpu")[0] == 0
    assert len(list((tmp_path / "store").glob("python_stdlib-*"))) == 1
    before = tree(tmp_path)
    status, said, _ = evaluate.ask(capsys, run, "--json", "--device", "cpu")
    assert status == 0 and json.loads(said)["loss"] == losses[0] and tree(tmp_path) == before


@pytest.mark.parametrize(
    "corpus",
    [
        {"dataset": "local", "dataset_path": "TEXT"},
        {"dataset": "hf", "dataset_path": "stranger/corpus"},
        {"dataset": "c4"},
    ],
    ids=lambda corpus: corpus["dataset"],
)
def test_other_corpora_are_named_on_the_command_line(run, tmp_path, capsys, monkeypatch, corpus):
    (tmp_path / "a.txt").write_text("a\n" * 99)
    corpus = {key: value.replace("TEXT", str(tmp_path / "a.txt")) for key, value in corpus.items()}
    change(run, {"training": corpus, "validation": CORPORA["validation"]})
    no_network(monkeypatch)
    before = tree(tmp_path)
    status, _, told = evaluate.ask(capsys, run, "--device", "cpu")
    assert status == 2 and "validation.dataset: got" in told and told.count("\n") == 1
    assert "--corpus" in told and tree(tmp_path) == before


def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a network was asked for")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_tokenizer_of_the_hub_is_read_from_the_cache_alone(run, tmp_path, capsys, monkeypatch):
    change(run, {"model": {"hf_assets_path": "hf://stranger/tokenizer"}})
    no_network(monkeypatch)
    for ask, options in (
        (generate, ["--prompt", "a"]),
        (export, [tmp_path / "out"]),
        (evaluate, []),
    ):
        status, _, told = ask.ask(capsys, run, *options)
        assert status == 2 and "hf download stranger/tokenizer" in told and told.count("\n") == 1
