# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""c4 through Hugging Face streaming, on a local copy of the same form."""

import json

import pytest
import torch

from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.data.hub_corpus import HubCorpus
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan.base import JobConfig

SHARDS, DOCUMENTS, SEQ = 6, 11, 32
README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: train-*.json
  - split: validation
    path: validation.json
---
"""


def document(shard, i):
    return f"shard {shard} document {i} " + "some text " * ((shard * 5 + i * 3) % 17)


@pytest.fixture(scope="module")
def c4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c4")
    (folder / "README.md").write_text(README)
    for shard in range(SHARDS):
        lines = (json.dumps({"text": document(shard, i), "url": "u"}) for i in range(DOCUMENTS))
        (folder / f"train-{shard:05}.json").write_text("\n".join(lines))
    held = (json.dumps({"text": f"held out {i} " * 20, "url": "u"}) for i in range(30))
    (folder / "validation.json").write_text("\n".join(held))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer():
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    return build_tokenizer(job)


def build(c4, tokenizer, dp, local_batch, rows, infinite=True):
    job = JobConfig()
    job.training.dataset, job.training.dataset_path = "c4", c4
    job.training.seq_len, job.training.local_batch_size = SEQ, local_batch
    job.training.global_batch_size = rows
    return [
        build_dataloader(
            dp_world_size=dp, dp_rank=rank, tokenizer=tokenizer, job_config=job, infinite=infinite
        )
        for rank in range(dp)
    ]


def steps(loaders, local_batch, rows, n):
    readers = [iter(loader) for loader in loaders]
    labels = [
        next(reader)[1]
        for _ in range(n * rows // (local_batch * len(loaders)))
        for reader in readers
    ]
    return torch.cat(labels).unflatten(0, (n, rows))


def test_every_document_position_resumes(c4):
    corpus = HubCorpus("c4", c4, "training")
    stream = corpus.stream(1, 3, infinite=True)
    found = [stream.next_document() for _ in range(60)]  # almost three passes
    texts = [text for _, text in found]
    assert texts[22:44] == texts[:22]
    for i in range(0, 50, 3):
        again = corpus.stream(1, 3, infinite=True)
        again.seek(json.loads(json.dumps(found[i][0])))
        resumed = [again.next_document() for _ in range(10)]
        assert [text for _, text in resumed] == texts[i : i + 10]
        # A stream that was resumed can be resumed again.
        chained = corpus.stream(1, 3, infinite=True)
        chained.seek(json.loads(json.dumps(resumed[4][0])))
        assert [chained.next_document()[1] for _ in range(6)] == texts[i + 4 : i + 10]
    # Negative control: the position is used.
    assert corpus.stream(1, 3, infinite=True).next_document()[1] != texts[3]


@pytest.mark.parametrize("rows", [4, 12])
def test_same_batches_at_any_split_and_after_resume(c4, tokenizer, rows):
    """With 12 rows two of them share a shard, and stay on one rank."""
    expected = steps(build(c4, tokenizer, 1, rows, rows), rows, rows, 60)
    states = []
    splits = {4: [(4, 1), (2, 1), (1, 2)], 12: [(6, 2), (3, 2), (2, 6), (1, 4)]}[rows]
    for dp, local_batch in splits:
        loaders = build(c4, tokenizer, dp, local_batch, rows)
        assert torch.equal(steps(loaders, local_batch, rows, 45), expected[:45])
        states.append({})
        for loader in loaders:
            states[-1] |= loader.state_dict()
    # Every split stores the same, so that each may resume from any: here from the next one's.
    assert all(state == states[0] for state in states)
    for (dp, local_batch), state in zip(splits, states[1:] + states[:1], strict=True):
        resumed = build(c4, tokenizer, dp, local_batch, rows)
        for loader in resumed:
            loader.load_state_dict(state)
        assert torch.equal(steps(resumed, local_batch, rows, 15), expected[45:])


def test_a_split_that_tears_a_stripe_apart_is_refused(c4, tokenizer):
    with pytest.raises(ConfigError) as error:
        build(c4, tokenizer, 4, 3, 12)
    text = str(error.value)
    assert "training.local_batch_size: got 3, expected 2 or 4" in text and "\n" not in text
    with pytest.raises(ConfigError, match="got 1, expected 2: "):
        build(c4, tokenizer, 4, 1, 12)


def test_a_shard_that_breaks_off_is_a_data_error(tmp_path):
    (tmp_path / "README.md").write_text(README)
    good = json.dumps({"text": "a document", "url": "u"})
    (tmp_path / "train-00000.json").write_text(f"{good}\n")
    (tmp_path / "train-00001.json").write_text("[1, 2\n")
    (tmp_path / "validation.json").write_text(f"{good}\n")
    stream = HubCorpus("c4", str(tmp_path), "training").stream(0, 1, infinite=True)
    assert stream.next_document()[1] == "a document"
    with pytest.raises(DataError) as error:
        stream.next_document()
    text = str(error.value)
    assert text.startswith("training.dataset: got 'c4'") and "\n" not in text
