# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The training loader: the same global batches for every split, across checkpoints too."""

import itertools
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_lr.data import local_corpus
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.data.stripes import stripe_block
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan.base import JobConfig

pytestmark = pytest.mark.usefixtures("small_library")

ROWS, SEQ = 8, 32
# (dp size, local batch): every split of eight rows over ranks and micro-batches that divides.
SPLITS = [(d, b) for d in (1, 2, 4, 8) for b in (1, 2, 4, 8) if ROWS % (d * b) == 0]


@pytest.fixture(scope="module")
def tokenizer():
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    return build_tokenizer(job)


@pytest.fixture
def text(tmp_path):
    """A corpus of many small documents, a fraction of a window to several windows long."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(19):
        lines = "".join(f"file {i} line {n} {'word ' * (n * i % 13)}\n" for n in range(5 + i * 3))
        (folder / f"{i:02}.txt").write_text(lines)
    return str(folder)


def config(local_batch, path=None, rows=ROWS):
    job = JobConfig()
    job.training.dataset = "local" if path else "python_stdlib"
    job.training.dataset_path = path
    job.training.seq_len = SEQ
    job.training.local_batch_size = local_batch
    job.training.global_batch_size = rows
    return job


def build(tokenizer, dp, local_batch, path=None, rows=ROWS, infinite=True):
    job = config(local_batch, path, rows)
    return [
        build_dataloader(
            dp_world_size=dp, dp_rank=rank, tokenizer=tokenizer, job_config=job, infinite=infinite
        )
        for rank in range(dp)
    ]


def steps(loaders, local_batch, n, rows=ROWS):
    """Return n global batches (n, rows, seq) of inputs and of labels, rows in global order."""
    readers = [iter(loader) for loader in loaders]
    batches = []
    for _ in range(n):
        for _ in range(rows // (local_batch * len(loaders))):
            for reader in readers:
                inputs, labels = next(reader)
                assert inputs["input"].shape == labels.shape == (local_batch, SEQ)
                assert inputs["input"].dtype == labels.dtype == torch.int64
                batches.append(torch.stack([inputs["input"], labels]))
    return torch.cat(batches, 1).unflatten(1, (n, rows))


def union(loaders):
    state = {}
    for loader in loaders:
        state |= loader.state_dict()
    return state


@pytest.mark.parametrize("split", SPLITS)
def test_batches_do_not_depend_on_the_split(tokenizer, text, split):
    reference = steps(build(tokenizer, 1, ROWS, text), ROWS, 30)
    assert torch.equal(steps(build(tokenizer, *split, text), split[1], 30), reference)


def test_batches_do_depend_on_the_global_batch_size(tokenizer, text):
    """Negative control: the comparison above tells batches apart."""
    reference = steps(build(tokenizer, 1, ROWS, text), ROWS, 4)
    other = steps(build(tokenizer, 1, 4, text, rows=4), 4, 8, rows=4)
    assert not torch.equal(other.flatten(1, 2), reference.flatten(1, 2))


def test_stdlib_rows_are_packed_as_torchtitan_packs(tokenizer, monkeypatch):
    """Row j equals torchtitan's own dataset run over the files of stripe j."""
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    loader = build(tokenizer, 1, ROWS)[0]
    corpus = loader._corpus
    batches = steps([loader], ROWS, 20)
    for row in (0, 5):
        blocks = (stripe_block(row, ROWS, corpus.num_blocks, k) for k in itertools.count())
        documents = ({"text": t} for block in blocks for t in corpus.documents(block))
        theirs = object.__new__(HuggingFaceTextDataset)
        theirs.seq_len, theirs.infinite, theirs._tokenizer = SEQ, False, tokenizer
        theirs._token_buffer, theirs._sample_idx, theirs._data = [], 0, documents
        theirs._text_processor = lambda sample: sample["text"]
        for step, (inputs, labels) in zip(range(20), theirs, strict=False):
            assert torch.equal(batches[0, step, row], inputs["input"])
            assert torch.equal(batches[1, step, row], labels)


FEW = [(4, 1), (2, 4), (8, 1)]
MANY = [*FEW, (4, 2), (2, 1), (1, 8), (1, 2)]


@pytest.mark.parametrize(
    ("path", "done", "splits"), [("text", 0, FEW), ("text", 3, MANY), (None, 3, FEW)]
)
def test_resume_at_any_split_through_a_real_checkpoint(
    tokenizer, text, tmp_path, path, done, splits
):
    path = text if path else None
    saved = build(tokenizer, 4, 1, path)
    if done:
        steps(saved, 1, done)
    # Each of four ranks writes its own stripes; here one process writes the union of their keys.
    dcp.save({"dataloader": union(saved)}, checkpoint_id=str(tmp_path / "ckpt"))
    expected = steps(saved, 1, 30)
    for dp, local_batch in splits:
        loaders = build(tokenizer, dp, local_batch, path)
        for loader in loaders:
            loader.check_checkpoint(str(tmp_path / "ckpt"))
            dcp.load({"dataloader": loader}, checkpoint_id=str(tmp_path / "ckpt"))
            assert loader.state_dict()["sample_index"] == done * ROWS
        assert torch.equal(steps(loaders, local_batch, 30), expected)


def test_resume_between_micro_batches(tokenizer, text):
    loader = build(tokenizer, 1, 2, text)[0]
    reader = iter(loader)
    for _ in range(5):
        next(reader)
    state = loader.state_dict()
    assert state["sample_index"] == 10
    expected = [next(reader)[1] for _ in range(9)]
    again = build(tokenizer, 1, 2, text)[0]
    again.load_state_dict(state)
    assert all(torch.equal(a, b[1]) for a, b in zip(expected, again, strict=False))
    with pytest.raises(ConfigError, match="micro-batch border at row 2"):
        build(tokenizer, 1, 4, text)[0].load_state_dict(state)


@pytest.mark.parametrize(
    "tampered",
    [lambda at: at | {"offset": 0}, lambda at: at | {"document": [at["document"][0] + 1, 0]}],
    ids=["offset", "document"],
)
def test_a_tampered_position_gives_other_batches(tokenizer, tampered):
    """Negative control: both parts of a stripe's position are used on resume."""
    loader = build(tokenizer, 1, ROWS)[0]
    steps([loader], ROWS, 3)
    state = loader.state_dict()
    expected = steps([loader], ROWS, 1)
    position = json.loads(state["lane_2"])
    assert tampered(position) != position
    state["lane_2"] = json.dumps(tampered(position) | {"offset": 0})
    resumed = build(tokenizer, 1, ROWS)[0]
    resumed.load_state_dict(state)
    got = steps([resumed], ROWS, 1)
    assert not torch.equal(got[:, :, 2], expected[:, :, 2])
    others = [row for row in range(ROWS) if row != 2]
    assert torch.equal(got[:, :, others], expected[:, :, others])


def test_one_pass_ends(tokenizer, text):
    loader = build(tokenizer, 1, ROWS, text, infinite=False)[0]
    inputs = [batch[0]["input"] for batch in loader]
    assert 0 < len(inputs) < 100


@pytest.mark.parametrize("rows", [4, 16])
def test_another_global_batch_size_is_refused(tokenizer, text, tmp_path, rows):
    dcp.save({"dataloader": build(tokenizer, 1, 8, text)[0]}, checkpoint_id=str(tmp_path / "c"))
    loader = build(tokenizer, 1, 4, text, rows=rows)[0]
    with pytest.raises(ConfigError) as error:
        loader.check_checkpoint(str(tmp_path / "c"))
    text = str(error.value)
    assert f"training.global_batch_size: got {rows}, expected 8 " in text and "\n" not in text
    with pytest.raises(ConfigError, match="global_batch_size"):
        loader.load_state_dict(build(tokenizer, 1, 8)[0].state_dict())


def test_another_corpus_is_refused(tokenizer, text, tmp_path):
    dcp.save({"dataloader": build(tokenizer, 1, 8, text)[0]}, checkpoint_id=str(tmp_path / "c"))
    loader = build(tokenizer, 1, 8)[0]
    for act in (
        lambda: loader.check_checkpoint(str(tmp_path / "c")),
        lambda: loader.load_state_dict(build(tokenizer, 1, 8, text)[0].state_dict()),
    ):
        with pytest.raises(ConfigError) as error:
            act()
        message = str(error.value)
        assert "training.dataset" in message and "\n" not in message
        assert "python_stdlib blocks=" in message and "local blocks=" in message


def test_a_checkpoint_from_before_the_split_is_refused(tokenizer, text):
    state = build(tokenizer, 1, 8, text)[0].state_dict()
    assert state["corpus"].endswith(" held_out=1/200")
    build(tokenizer, 1, 8, text)[0].load_state_dict(state)
    state["corpus"] = state["corpus"].removesuffix(" held_out=1/200")
    with pytest.raises(ConfigError, match=r"training\.dataset: got .*held_out=1/200"):
        build(tokenizer, 1, 8, text)[0].load_state_dict(state)


def write_lines(folder, broken=(), n=120):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"line {i} " + "word " * (i % 9)}) for i in range(n)]
    for i in broken:
        lines[i] = lines[i][:-1]
    (folder / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    return str(folder)


def test_a_changed_corpus_goes_on_where_it_is_allowed(tokenizer, tmp_path):
    path = write_lines(tmp_path / "text")
    loader = build(tokenizer, 1, ROWS, path)[0]
    steps([loader], ROWS, 3)
    state = loader.state_dict()
    expected = steps([loader], ROWS, 5)
    write_lines(tmp_path / "text", n=150)
    with pytest.raises(ConfigError, match=r"training\.allow_changed_corpus = true"):
        build(tokenizer, 1, ROWS, path)[0].load_state_dict(state)

    def changed(path, key="training.allow_changed_corpus"):
        job = config(ROWS, path)
        job.training.allow_changed_corpus = True
        loader = build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job)
        loader.load_state_dict(state)
        return loader

    loader = changed(path)
    assert loader.state_dict()["sample_index"] == 3 * ROWS
    assert not torch.equal(steps([loader], ROWS, 5), expected)
    # An unchanged corpus is resumed exactly, and another kind is none that changed.
    write_lines(tmp_path / "text")
    assert torch.equal(steps([changed(path)], ROWS, 5), expected)
    with pytest.raises(ConfigError) as error:
        changed(None)
    assert "allow_changed_corpus" not in str(error.value)


def test_skipped_records_are_part_of_the_position(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(local_corpus, "SMALL_BYTES", 0)
    path = write_lines(tmp_path / "text", broken=(0, 50))
    job = config(ROWS, path)
    job.training.max_bad_records = 2
    options = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": tokenizer, "job_config": job}
    loader = build_dataloader(**options)
    steps([loader], ROWS, 20)
    bad = {f"{path}/a.jsonl:1", f"{path}/a.jsonl:51"}
    assert loader.bad_records == bad
    state = loader.state_dict()
    expected = steps([loader], ROWS, 5)
    again = build_dataloader(**options)
    again.load_state_dict(state)
    assert again.bad_records == bad
    assert torch.equal(steps([again], ROWS, 5), expected)
    job.training.max_bad_records = 1
    with pytest.raises(DataError, match=r"training\.max_bad_records = 1 are skipped already"):
        steps([build_dataloader(**options)], ROWS, 20)


def test_the_marked_position_is_the_one_to_save(tokenizer, text):
    loader = build(tokenizer, 1, ROWS, text)[0]
    steps([loader], ROWS, 3)
    before = loader.state_dict()
    loader.mark()
    steps([loader], ROWS, 2)
    assert loader.state_dict() != before
    loader.return_to_mark()
    assert loader.state_dict() == before


def test_sizes_that_do_not_divide_and_workers_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"training\.global_batch_size: got 8, expected a multi"):
        build(tokenizer, 1, 3)
    job = config(8)
    job.training.dataloader.num_workers = 4
    with pytest.raises(ConfigError, match=r"training\.dataloader\.num_workers: got 4, expected 0"):
        build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job)
