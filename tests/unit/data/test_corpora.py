# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The embedded corpus, the names, and the refusals."""

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from torchtitan_lr.data import corpora
from torchtitan_lr.data.checks import check_corpus, check_sequences
from torchtitan_lr.data.corpora import PythonStdlib, build_corpus, validation_source
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan.base import JobConfig


def config(dataset="python_stdlib", path=None, validation="python_stdlib", validation_path=None):
    job = JobConfig()
    job.training.dataset, job.training.dataset_path = dataset, path
    job.validation.enable = True
    job.validation.dataset, job.validation.dataset_path = validation, validation_path
    return job


def one_line(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, (part, text)


def write(root, relative, text="x = 1\n"):
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_stdlib_splits_are_the_sources_without_tests_and_packages():
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    expected = {"train": [], "validation": []}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if skipped & set(relative.parts[:-1]) or not path.is_file() or not path.stat().st_size:
            continue
        held_out = int(hashlib.sha256(relative.as_posix().encode()).hexdigest(), 16) % 20 == 0
        expected["validation" if held_out else "train"].append(relative.as_posix())
    for split, names in expected.items():
        corpus = PythonStdlib(split, "training.dataset")
        assert [name for name, _ in corpus._files] == sorted(names)
        assert corpus.num_blocks == len(names) > 10
        texts = list(corpus)
        assert len(texts) == len(names)
        # Read in the order of the hashes that also split them.
        first = min(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        assert texts[0] == (root / first).read_text("utf-8", errors="replace")


def test_stdlib_leaves_out_tests_packages_and_empty_files(tmp_path):
    for name in ("b.py", "a/z.py", "a.py", "notes.txt", "site-packages/p.py", "a/tests/t.py"):
        write(tmp_path, name)
    for name in ("test/t.py", "lib2to3/tests/t.py", "idlelib/idle_test/t.py", "testing/kept.py"):
        write(tmp_path, name)
    write(tmp_path, "empty.py", "")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    held_out = next(f"v{i}.py" for i in range(999) if PythonStdlib.is_validation(f"v{i}.py"))
    write(tmp_path, held_out)
    splits = {
        split: [name for name, _ in PythonStdlib(split, "k", tmp_path)._files]
        for split in ("train", "validation")
    }
    assert splits["validation"] == [held_out]
    assert splits["train"] == ["a.py", "a/z.py", "b.py", "testing/kept.py"]


def test_a_file_that_is_gone_is_named(tmp_path):
    write(tmp_path, "a.py")
    corpus = PythonStdlib("train", "training.dataset", tmp_path)
    assert list(corpus) == ["x = 1\n"]
    (tmp_path / "a.py").unlink()
    with pytest.raises(DataError) as error:
        corpus.stream(0, 1, infinite=True).next_document()
    one_line(error, "training.dataset", "a.py", "readable")


def test_fingerprint_follows_the_files(tmp_path):
    for name in ("a.py", "b.py", "c.py"):
        write(tmp_path, name)
    first = PythonStdlib("train", "k", tmp_path).fingerprint()
    assert first == PythonStdlib("train", "k", tmp_path).fingerprint()
    write(tmp_path, "b.py", "x = 12\n")
    assert first != PythonStdlib("train", "k", tmp_path).fingerprint()
    assert "\n" not in first


@pytest.mark.parametrize(
    ("job", "parts"),
    [
        (
            config("c5"),
            ["training.dataset", "'c5'", "python_stdlib, python_stdlib_docs, local, c4"],
        ),
        (config(validation="c4"), ["validation.dataset", "'c4'", "c4_validation"]),
        (
            config("c4_validation", None, "training"),
            ["validation.dataset", "'training'", "a corpus other than", "no held-out part"],
        ),
        (
            config("c4_validation", None, "c4_validation"),
            ["validation.dataset", "'c4_validation'", "another corpus"],
        ),
        (
            config(validation="training", validation_path="/tmp"),
            ["validation.dataset_path", "'/tmp'", "validation.dataset = 'local'"],
        ),
        (config("local"), ["training.dataset_path", "None", ".jsonl"]),
        (config("local", "/no/such"), ["training.dataset_path", "'/no/such'", "existing"]),
        (config("local", "/no/such/*.txt"), ["training.dataset_path", "pattern that matches"]),
        (config(path="/tmp"), ["training.dataset_path", "'/tmp'", "training.dataset = 'local'"]),
        (config("c4", "/no/such"), ["training.dataset_path", "'/no/such'", "local copy"]),
        (
            config(validation="local", validation_path="/no/such"),
            ["validation.dataset_path", "'/no/such'"],
        ),
    ],
)
def test_refusals(job, parts):
    with pytest.raises(ConfigError) as error:
        check_corpus(job)
    one_line(error, *parts)


@pytest.mark.parametrize("pattern", ["", "*.txt", "../corpus/sub", "sub/b.txt", "link.txt"])
def test_validation_on_files_that_are_trained_on_is_refused(tmp_path, pattern):
    corpus = tmp_path / "corpus"
    write(corpus, "a.txt", "some text\n")
    write(corpus, "sub/b.txt", "more text\n")
    write(tmp_path, "other.txt", "other text\n")
    (corpus / "link.txt").symlink_to(corpus / "a.txt")
    with pytest.raises(ConfigError) as error:
        check_corpus(config("local", str(corpus), "local", str(corpus / pattern)))
    one_line(error, "validation.dataset_path", "not trained on", "validation.dataset = 'training'")
    check_corpus(config("local", str(corpus), "local", str(tmp_path / "other.txt")))


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (("python_stdlib", None), ("python_stdlib", None, "validation")),
        (("local", "/text"), ("local", "/text", "validation")),
        (("c4", "/copy"), ("c4_validation", "/copy", "validation")),
    ],
)
def test_validation_is_what_training_holds_out_unless_another_is_named(trained, expected):
    source = validation_source(config(*trained, validation="training"))
    assert (source.name, source.path, source.split, source.key) == (*expected, "training")
    named = validation_source(config(*trained, validation="local", validation_path="/other"))
    assert (named.name, named.path, named.split, named.key) == (
        "local", "/other", "all", "validation",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.txt", "text in UTF-16\n".encode("utf-16"), "UTF-16"),
        ("a.txt", ("text in UTF-16\n" * 9).encode("utf-16-le"), "UTF-16 without"),
        ("a.jsonl", ('{"text": "x"}\n' * 9).encode("utf-16-be"), "UTF-16 without"),
        ("a.txt", b"PK\x03\x04\x14\x00\x08\x08 and some letters after it", "binary"),
        ("a.txt", "русский текст".encode("koi8-r"), "another encoding"),
    ],
    ids=["utf16", "utf16_without_mark", "utf16_jsonl", "binary", "koi8"],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, part):
    (tmp_path / "0.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(40)))
    check_corpus(config("local", str(tmp_path)))
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("more\n")
    with pytest.raises(ConfigError) as error:
        check_corpus(config("local", str(tmp_path)))
    one_line(error, "training.dataset_path", name, part, "text in UTF-8")


@pytest.fixture(scope="module")
def tokenizer():
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    return build_tokenizer(job)


def test_a_corpus_without_one_sequence_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(30)))
    tokens = [
        sum(len(tokenizer.encode(text, add_bos=True, add_eos=True)) for text in corpus)
        for corpus in (
            build_corpus("local", str(tmp_path), split, "training")
            for split in ("train", "validation")
        )
    ]
    job = config("local", str(tmp_path), "training")
    job.training.seq_len, job.validation.seq_len = tokens[0] - 1, tokens[1] - 1
    check_sequences(job, tokenizer)
    job.validation.seq_len += 1
    with pytest.raises(ConfigError) as error:
        check_sequences(job, tokenizer)
    one_line(error, f"validation.seq_len: got {tokens[1]}, expected at most {tokens[1] - 1}")
    one_line(error, "held-out part", f"has {tokens[1]} tokens")
    job.validation.enable = False
    check_sequences(job, tokenizer)
    job.training.seq_len += 1
    with pytest.raises(ConfigError) as error:
        check_sequences(job, tokenizer)
    one_line(error, f"training.seq_len: got {tokens[0]}, expected at most {tokens[0] - 1}")


def test_local_without_text_is_refused(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError) as error:
        check_corpus(config("local", str(tmp_path)))
    one_line(error, "training.dataset", "'local'", "with text")


def test_the_shipped_corpus_is_the_same_text_everywhere():
    """Against zstd's own decoder and the rule by hand; the package alone decides the bytes."""
    import pyarrow

    packed = corpora.CPYTHON.read_bytes()
    assert len(packed) <= 1_500_000
    raw = pyarrow.input_stream(pyarrow.py_buffer(packed), compression="zstd").read()
    digest = hashlib.sha256(raw).hexdigest()
    assert digest == "1842eed1b46cdfe58024193b86dca7645c177c2e7f05020d4d5740d8f40dbac2"
    records = [json.loads(line) for line in raw.decode().splitlines()]
    hashes = {r["path"]: hashlib.sha256(r["path"].encode()).hexdigest() for r in records}
    records.sort(key=lambda record: hashes[record["path"]])
    for split in ("train", "validation"):
        held = split == "validation"
        wanted = [r["text"] for r in records if (int(hashes[r["path"]], 16) % 20 == 0) == held]
        assert list(build_corpus("cpython", None, split, "training")) == wanted
        assert len(wanted) == (18 if held else 341)
    licence = (corpora.CPYTHON.parent / "LICENSE.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
