# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run prepares, and the folder that all runs share."""

import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tests.support.corpora import write_jsonl
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data import prepare
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.prepare import ensure_prepared, free, prepare_for_ranks, wanted
from torchtitan_lr.errors import ConfigError, DataError

TEXTS = [f"Line {i} of {i * i} words. " * 3 for i in range(200)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return a function that makes a configuration on 200 lines of text."""
    monkeypatch.setattr(prepare, "_held", {})
    write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def make(*arguments, path=tmp_path / "a.jsonl"):
        own = [f"--training.dataset=local --training.dataset_path={path}"] if path else []
        given = " ".join([*own, f"--training.token_folder={tmp_path / 'store'}", *arguments])
        return build_job_config(["--job.config_file=train_configs/debug_cola.toml", *given.split()])

    return make


def test_a_run_prepares_once_and_its_ranks_find_it(tmp_path, config, monkeypatch):
    job = config("--validation.enable")
    variables = prepare_for_ranks(job, world_size=2)
    (part,) = ensure_prepared(job)
    assert (part.weight, part.name) == (1.0, "local")
    corpus = Corpus.open(part.folder)
    assert sum(info.documents for info in corpus.train + corpus.held_out) == 200
    # A rank neither lists the files nor opens the tokenizer.
    monkeypatch.setattr(prepare, "Reader", None)
    monkeypatch.setattr(prepare, "build_tokenizer", None)
    monkeypatch.setenv(prepare.PREPARED, variables[prepare.PREPARED])
    assert ensure_prepared(job) == ensure_prepared(job, "validation") == [part]


def test_the_folder_follows_the_file_and_not_how_it_was_named(tmp_path, config, monkeypatch):
    first = ensure_prepared(config())[0].folder
    monkeypatch.setenv("TORCHTITAN_LR_CALLER", str(tmp_path))  # where the command was typed
    assert ensure_prepared(config(path="a.jsonl"))[0].folder == first
    monkeypatch.setenv("TORCHTITAN_LR_CALLER", str(tmp_path.parent))
    assert ensure_prepared(config(path=f"{tmp_path.name}/a.json*"))[0].folder == first
    with pytest.raises(ConfigError, match="an existing file"):
        ensure_prepared(config(path="a.jsonl"))
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    second = ensure_prepared(config())[0].folder
    assert first != second
    assert Corpus.open(first).identity == Corpus.open(second).identity  # the text is the same


def test_records_that_another_run_was_allowed_to_lose(tmp_path, config):
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"a\.jsonl:201"):
        ensure_prepared(config())
    ensure_prepared(config("--training.max_bad_records=1"))
    with pytest.raises(ConfigError, match=r"training\.max_bad_records: got 0, expected .* = 1"):
        ensure_prepared(config())


def test_a_mixture_has_a_folder_and_a_share_for_each(tmp_path, config):
    (tmp_path / "b.txt").write_text("Other words.\n" * 900)
    job = config(path=None)
    job.training.mixture = [
        {"dataset": "local", "path": str(tmp_path / "a.jsonl"), "weight": 3, "name": "a"},
        {"dataset": "local", "path": str(tmp_path / "b.txt")},
    ]
    parts = ensure_prepared(job)
    assert [(part.name, part.weight) for part in parts] == [("a", 0.75), ("local", 0.25)]
    assert len({part.folder for part in parts}) == 2
    for entry, why in [
        ({"dataset": "local", "path": "x", "wieght": 1}, "one of the keys dataset, weight, path"),
        ({"path": "x"}, "a corpus such as 'local'"),
        ({"dataset": "local", "path": "x", "weight": 0}, "a positive number"),
        ({"dataset": "local", "path": "x", "weight": "1"}, "a positive number"),
        ({"dataset": "local", "path": 1}, "a string"),
        ({"dataset": "local", "path": "x", "name": "a"}, "different names"),
    ]:
        job.training.mixture = [{"dataset": "cpython", "name": "a"}, entry]
        with pytest.raises(ConfigError, match=why):
            wanted(job)


HF = {"dataset": "hf", "dataset_path": "a/b@1.0"}
SPLIT = {"dataset": "hf", "path": "a/b", "hf_split": "web", "hf_name": "en"}  # in a mixture
TRAIN, TEST = 10 * 8 * 100, 2 * 4 * 4 * 50  # of the steps and one more, and of one validation


C4 = [f"allenai/c4 en train train {TRAIN}", f"allenai/c4 en validation held_out {TEST}"]
OWN_SPLITS = [f"a/b en web train {TRAIN}", f"a/b en test held_out {TEST}"]


@pytest.mark.parametrize(
    ("section", "training", "expected"),
    [
        ("training", {"dataset": "c4"}, C4),
        ("training", HF, [f"a/b@1.0 None train both {TRAIN}"]),
        ("training", HF | {"hf_streaming": False}, ["a/b@1.0 None train both None"]),
        ("training", HF | {"hf_tokens": 7000}, ["a/b@1.0 None train both 7000"]),
        ("training", {"mixture": [SPLIT], "hf_held_out": "test"}, OWN_SPLITS),
        ("validation", HF, C4[1:]),
    ],
)
def test_how_much_of_a_dataset_of_the_hub_is_prepared(config, section, training, expected):
    options = "--training.steps=9 --training.global_batch_size=8 --training.seq_len=99"
    options += " --validation.enable --validation.steps=2 --validation.local_batch_size=4"
    options += " --validation.seq_len=49 --parallelism.tensor_parallel_degree=2"
    job = config(options, "--validation.dataset=c4_validation", path=None)
    vars(job.training).update(training)
    (part,) = wanted(job, section, world_size=8)
    assert [
        f"{source.paths[0]} {source.config} {source.split} {source.part} {source.tokens}"
        for source in part.sources
    ] == expected


def test_a_prepared_folder_of_the_user(tmp_path, config):
    folder = Path(ensure_prepared(config())[0].folder)
    job = config("--training.dataset=prepared", f"--training.dataset_path={folder}", path=None)
    assert ensure_prepared(job)[0].folder == str(folder)
    shard = folder / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="it was cut"):
        prepare_for_ranks(job, 1)


def test_two_runs_prepare_a_folder_once_and_train_at_the_same_time(config, monkeypatch):
    tokenize, context = prepare.tokenize, multiprocessing.get_context("fork")
    calls, barrier = context.Value("i"), context.Barrier(3)

    def slow(*args, **options):
        with calls.get_lock():
            calls.value += 1
        time.sleep(0.5)
        return tokenize(*args, **options)

    def run():
        Corpus.open(ensure_prepared(config())[0].folder).check()
        barrier.wait(30)  # none waits for the end of another, which keeps its lock

    monkeypatch.setattr(prepare, "tokenize", slow)
    children = [context.Process(target=run) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert calls.value == 1


def test_the_oldest_unused_folders_go(tmp_path, config, monkeypatch):
    store, folders = tmp_path / "store", []
    (store / "of the user").mkdir(parents=True)
    for age, lines in enumerate((200, 50, 70)):
        path = write_jsonl(tmp_path / f"{age}.jsonl", TEXTS[:lines])
        folders.append(Path(ensure_prepared(config(path=path))[0].folder))
        os.utime(store / "locks" / folders[-1].name, (age + 1, age + 1))
    assert free(store, 1) > 1  # this process reads all of them
    assert all(folder.exists() for folder in folders)
    for folder in folders[1:]:
        prepare._held.pop(folder).close()
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert free(store, sizes[0] + sizes[2]) == sizes[0] + sizes[2]
    assert [folder.exists() for folder in folders] == [True, False, True]  # the first is in use
    assert (store / "of the user").exists()
    # On a file system without locks it is prepared again, and nothing is deleted.
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.truncate("/no/such", 0))  # an OSError
    folders[1].mkdir()
    (folders[1] / "train-00000.bin").touch()  # a deletion that was killed
    ensure_prepared(config(path=tmp_path / "1.jsonl"))
    free(store, 0)
    assert all((folder / "corpus.json").exists() for folder in folders)
