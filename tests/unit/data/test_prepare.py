# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run prepares, and the folder that all runs share."""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import torchtitan_lr.training.register  # noqa: F401  (registers the models)
from tests.support.corpora import write_jsonl
from tests.support.processes import in_child
from torchtitan_lr.checks.values import check_vocabulary
from torchtitan_lr.config import files
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data import prepare
from torchtitan_lr.data import tokenize as tokenizing
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.prepare import ensure_prepared, prepare_for_ranks, wanted
from torchtitan_lr.data.sources import Reader, Source
from torchtitan_lr.data.tokenize import prepare_folder
from torchtitan_lr.data.tokenizer import Tokenizer
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan import logger

TOKENIZER = Tokenizer("torchtitan_lr/data/assets/bpe4k")
TEXTS = [f"Line {i} of {i * i} words. " * 3 for i in range(200)]


@pytest.fixture
def config(tmp_path):
    """Return a function that makes a configuration on 200 lines of text."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def make(*arguments, path=tmp_path / "a.jsonl"):
        own = [f"--training.dataset=local --training.dataset_path={path}"] if path else []
        given = " ".join([*own, f"--training.token_folder={tmp_path / 'store'}", *arguments])
        return build_job_config(["--job.config_file=train_configs/debug_cola.toml", *given.split()])

    return make


def test_a_run_prepares_once_and_its_ranks_find_it(tmp_path, config, monkeypatch):
    job = config("--validation.enable")
    variables = prepare_for_ranks(job)
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
    assert ensure_prepared(config())[0].folder == first


@pytest.mark.parametrize("sampled", [1 << 26, 0], ids=["read whole", "sampled"])
def test_another_text_of_the_same_size_and_time(tmp_path, config, monkeypatch, sampled):
    """As `rsync -t`, `cp -p` and archives leave it."""
    monkeypatch.setattr(files, "SAMPLED_BYTES", sampled)
    path, found = tmp_path / "a.jsonl", set()
    for last in ("ends", "stop"):
        write_jsonl(path, [*TEXTS * 20, last])
        os.utime(path, ns=(1, 1))
        corpus = Corpus.open(ensure_prepared(config())[0].folder)
        found |= {str(corpus.folder), corpus.identity}
    assert len(found) == 4


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
    # Before the hours of the first, the second is found to be missing.
    job.training.mixture[1]["path"] = str(tmp_path / "c.txt")
    job.training.token_folder = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="an existing file"):
        ensure_prepared(job)
    assert not (tmp_path / "other").exists()
    for entry, why in [
        ({"dataset": "local", "path": "x", "wieght": 1}, "one of the keys dataset, weight, path"),
        ({"dataset": "local", "path": "x", "weight": 0}, "a positive number"),
        ({"dataset": "local", "path": "x", "name": "a"}, "different names"),
    ]:
        job.training.mixture = [{"dataset": "cpython", "name": "a"}, entry]
        with pytest.raises(ConfigError, match=why):
            wanted(job)


HF = {"dataset": "hf", "dataset_path": "a/b@1.0"}
SPLIT = {"dataset": "hf", "path": "a/b", "hf_split": "web", "hf_name": "en"}  # in a mixture
TRAIN, TEST = 10 * 8 * 100, 1 << 24  # of the steps and one more; of validation, whatever it reads

C4 = [f"allenai/c4 en train train {TRAIN}", f"allenai/c4 en validation held_out {TEST}"]
ALL = [C4[0], "allenai/c4 en validation held_out None"]
OWN_SPLITS = [f"a/b en web train {TRAIN}", f"a/b en test held_out {TEST}"]


@pytest.mark.parametrize(
    ("training", "validation", "expected"),
    [
        ({"dataset": "c4"}, {}, C4),
        # A set changes no corpus, and [validation] decides whatever it reads itself.
        ({"dataset": "c4"}, {"sets": [{"dataset": "training", "steps": -1}]}, C4),
        ({"dataset": "c4"}, {"steps": -1, "dataset": "cpython"}, ALL),
        (HF, {}, [f"a/b@1.0 None train both {TRAIN}"]),
        (HF | {"hf_streaming": False}, {}, ["a/b@1.0 None train both None"]),
        (HF | {"hf_tokens": 7000}, {}, ["a/b@1.0 None train both 7000"]),
        ({"mixture": [SPLIT], "hf_held_out": "test"}, {}, OWN_SPLITS),
    ],
)
def test_how_much_of_a_dataset_of_the_hub_is_prepared(config, training, validation, expected):
    options = "--training.steps=9 --training.global_batch_size=8 --training.seq_len=99"
    options += " --validation.enable --validation.steps=2 --validation.local_batch_size=4"
    options += " --validation.seq_len=49 --parallelism.tensor_parallel_degree=2"
    job = config(options, path=None)
    vars(job.training).update(training)
    vars(job.validation).update(validation)
    (part,) = wanted(job)
    assert [
        f"{source.paths[0]} {source.config} {source.split} {source.part} {source.tokens}"
        for source in part.sources
    ] == expected


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "a file system without locks"])
def test_two_runs_prepare_a_folder_at_the_same_time(config, monkeypatch, locks):
    """Once if there are locks; else both write the same bytes."""
    run_alone, context = tokenizing._Preparation.run, multiprocessing.get_context("fork")
    calls, barrier = context.Value("i"), context.Barrier(3)

    def refuse(*_, **__):
        raise NotImplementedError

    if not locks:
        monkeypatch.setattr(tokenizing.FileLock, "acquire", refuse)

    def slow(*args, **options):
        with calls.get_lock():
            calls.value += 1
        time.sleep(0.5)
        return run_alone(*args, **options)

    def run():
        Corpus.open(ensure_prepared(config())[0].folder).check()
        barrier.wait(30)

    monkeypatch.setattr(tokenizing._Preparation, "run", slow)
    children = [context.Process(target=run) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (calls.value == 1) == locks


@pytest.mark.parametrize("pattern", ["", "/**/*"], ids=["a folder", "a pattern"])
def test_a_folder_of_others_is_not_written_to(tmp_path, pattern, monkeypatch):
    """Nor is what was prepared in a folder read as its text."""
    data, out, other = tmp_path / "data", tmp_path / "data" / "tokens", tmp_path / "other"
    data.mkdir()
    text = write_jsonl(data / "a.jsonl", TEXTS)
    with text.open("a") as file:
        file.write("{\n")

    def command(folder, most=0):
        reader = Reader(Source("local", (f"{data}{pattern}",)))
        return prepare_folder([reader], TOKENIZER, folder, "--out", most)

    def refused(folder):
        with pytest.raises(ConfigError, match="new, empty or was begun by this command; it holds"):
            command(folder, 2)

    foreign = data / "train-00000.bin"
    foreign.write_bytes(b"of another program")
    refused(data)
    assert foreign.read_bytes() == b"of another program"
    assert sorted(os.listdir(data)) == ["a.jsonl", "train-00000.bin"]
    for folder in (out, other):
        with pytest.raises(DataError, match="max_bad_records"):
            command(folder)
    corpus = command(out, 1)  # its own begun folder
    assert [source["files"] for source in corpus.record["sources"]] == [1]
    assert command(out, 1).identity == corpus.identity
    with text.open("a") as file:
        file.write("{\n")
    refused(other)  # begun with another text
    # Both found an empty folder; the one that had the lock was killed.
    alone = tokenizing._alone

    @contextmanager
    def after_another(folder):
        with alone(folder):
            shutil.copytree(other, folder, dirs_exist_ok=True)
            yield

    monkeypatch.setattr(tokenizing, "_alone", after_another)
    refused(tmp_path / "third")


def test_what_a_small_corpus_holds_out_is_said(config, capsys):
    for _ in range(2):  # also where it is prepared: a run's own numbers need the line
        variables = prepare_for_ranks(config())
        corpus = Corpus.open(json.loads(variables[prepare.PREPARED]).popitem()[1])
        held = sum(info.documents for info in corpus.held_out)
        assert 10 < held < 40  # the control: not 1 in 200
        told = capsys.readouterr().err
        assert f"local: {held} of 200 documents are held out for validation (" in told
        assert "; 1 in 200 of a corpus above 8 MiB" in told


def test_rows_of_the_vocabulary_without_tokens_are_said(tmp_path, config, caplog):
    logger.addHandler(caplog.handler)
    try:
        for option, expected in [
            ("--model.hf_assets_path=torchtitan_lr/data/assets/bpe1k", ["3072 of the vocabulary"]),
            ("--model.hf_assets_path=torchtitan_lr/data/assets/bpe4k", []),
            ("--model.vocab_size=8192", []),  # the user's own choice
        ]:
            caplog.clear()
            check_vocabulary(config(option), 1, "cpu")
            said = [line for line in caplog.messages if "of the vocabulary" in line]
            assert [line[:22] for line in said] == expected
            assert not said or "--model.vocab_size=1024 leaves them out" in said[0]
    finally:
        logger.removeHandler(caplog.handler)


def test_a_store_of_another_user_is_read_and_a_refusal_tells_the_way_out(tmp_path):
    store = Path(tempfile.mkdtemp())  # pytest's own folder is closed to others
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    readers = [Reader(Source("local", (str(path),), part=part)) for part in ("train", "both")]
    assert all(reader.stamp for reader in readers)  # the text is read before
    prepare_folder(readers[:1], TOKENIZER, store / "there", "training.token_folder")
    store.chmod(0o555)

    def run():
        if os.getuid() == 0:
            os.setuid(65534)
        prepare_folder(readers[:1], TOKENIZER, store / "there", "training.token_folder")
        with pytest.raises(ConfigError, match=rf"{store}/b'.*Permission denied.*chmod g\+w"):
            prepare_folder(readers[1:], TOKENIZER, store / "b", "training.token_folder")

    status = in_child(run)
    store.chmod(0o755)
    shutil.rmtree(store)
    assert status == 0
