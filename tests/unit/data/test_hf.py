# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``training.dataset = "hf"``: folders of every form, streamed and from disk, without a network."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.unit.data.test_dataloader import ROWS, steps, union
from tests.unit.data.test_dataloader import tokenizer as tokenizer
from tests.unit.data.test_hub_corpus import c4 as c4
from tests.unit.data.test_order import build, options
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.checks import check_corpus
from torchtitan_lr.data.corpora import training_source, validation_source
from torchtitan_lr.errors import ConfigError, DataError

TEXTS = [f"document {i} " + "some text " * (i * 7 % 13) for i in range(600)]
FORMS = ["parquet", "jsonl", "jsonl.gz", "arrow", "saved", "one file"]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write(folder, form):
    """Write the texts as shards of one form; return the path to name."""
    folder.mkdir()
    if form == "saved":
        datasets.Dataset.from_dict({"content": TEXTS}).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    shards = 1 if form == "one file" else 8
    for shard in range(shards):
        texts = TEXTS[shard * 600 // shards : (shard + 1) * 600 // shards]
        path = folder / f"train-{shard:05}.{'parquet' if form == 'one file' else form}"
        table = pa.table({"content": texts, "id": list(range(len(texts)))})
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        elif form == "arrow":
            with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
                writer.write_table(table)
        else:
            data = "".join(json.dumps({"content": t, "id": 1}) + "\n" for t in texts).encode()
            with pa.output_stream(str(path), compression="gzip" if ".gz" in form else None) as out:
                out.write(data)
    return str(path) if form == "one file" else str(folder)


def config(path, streaming, local=ROWS, **keys):
    job = options(local=local)
    job.training.dataset, job.training.dataset_path = "hf", path
    job.training.hf_streaming, job.training.text_column = streaming, "content"
    for key, value in keys.items():
        setattr(job.training, key, value)
    return job


@pytest.mark.parametrize("form", FORMS)
def test_forms_streamed_and_from_disk(tmp_path, form):
    path = write(tmp_path / "data", form)
    for streaming in (True, False):
        job = config(path, streaming)
        job.validation.dataset, job.validation.dataset_path = "training", None
        trained = list(training_source(job).open())
        held = list(validation_source(job).open())
        assert sorted(trained + held) == sorted(TEXTS)
        assert 0 < len(held) < 12  # one in 200 of 600


@pytest.mark.parametrize("streaming", [True, False])
def test_resume_at_any_split(tokenizer, tmp_path, streaming):
    path = write(tmp_path / "data", "parquet")
    expected = steps(build(tokenizer, 1, config(path, streaming)), ROWS, 40)
    saved = build(tokenizer, 4, config(path, streaming, local=2))
    assert torch.equal(steps(saved, 2, 17), expected[:, :17])
    again = build(tokenizer, 2, config(path, streaming, local=1))
    for loader in again:
        loader.load_state_dict(union(saved))
    assert torch.equal(steps(again, 1, 23), expected[:, 17:])
    other = build(tokenizer, 1, config(path, streaming))
    assert not torch.equal(steps(other, ROWS, 23), expected[:, 17:])  # without the position


def test_what_does_not_work_is_refused(tmp_path):
    path = write(tmp_path / "data", "jsonl")

    def message(*arguments):
        arguments = [*arguments, "--training.dataset=hf"]
        with pytest.raises(ConfigError) as error:
            check_corpus(build_job_config(arguments))
        assert "\n" not in str(error.value)
        return str(error.value)

    place = f"--training.dataset_path={path}"
    assert "training.dataset_path: got None, expected a dataset of the Hub" in message()
    gone = message(f"--training.dataset_path={tmp_path}/nowhere")
    assert "expected a local copy of hf that exists" in gone
    wrong = message(place, "--training.text_column=body")
    assert "training.text_column: got 'body', expected one of the columns" in wrong
    assert "content, id" in wrong
    split = message(place, "--training.hf_split=dev")
    assert split.startswith("training.dataset: got 'hf', expected a dataset that opens at")
    column = [place, "--training.text_column=content", "--validation.enable"]
    assert "validation.steps: got -1, expected a number of batches" in message(*column)
    job = config(path, False, text_column="id")
    with pytest.raises(DataError, match=r"training\.text_column: got 'id', expected a column of"):
        next(iter(training_source(job).open()))
