# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TOML files and corpora that a run reads, checked before it starts."""

import json
import shutil

import pytest

import torchtitan_lr.training.register  # noqa: F401  (registers the models)
from tests.commands import ROOT
from tests.support.config_checks import MAIN, SHIPPED, check
from tests.support.corpora import write_jsonl
from torchtitan_lr.checks.values import check_corpora, check_data
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.prepare import ensure_prepared, validation_sets, wanted
from torchtitan_lr.errors import ConfigError

TOKENIZERS = ("torchtitan_lr/data/assets/bpe32k", "assets/hf/Llama-3.1-8B")
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_train_config_passes(path, tmp_path):
    """The main job's text and tokenizer stand in for those of the Hub."""
    overrides = [f"--job.dump_folder={tmp_path}", f"--model.hf_assets_path={SHIPPED}"]
    given = build_job_config([f"--job.config_file={path}"])
    assert "debug" in path.stem or given.model.hf_assets_path in TOKENIZERS
    if wanted(given)[0].sources[0].name == "hf":
        overrides.append("--training.dataset=cpython")
    if "initial_load_path" in path.read_text():
        overrides.append("--checkpoint.initial_load_path=")  # it need not be here
    world = 4 if "debug" in path.stem else max(8, least_ranks(vars(given.parallelism)))
    config = check(*overrides, world=world, device="cuda", config_file=path, data="prepare")
    share = 20 if given.optimizer.name == "Spectron" else 10
    assert config.lr_scheduler.warmup_steps == config.training.steps // share


@pytest.fixture
def own(tmp_path):
    """Return a function that checks a run on 200 lines of one's own text, ``a.jsonl``."""
    write_jsonl(tmp_path / "a.jsonl", [f"Line {i} of {i * i} words. " * 3 for i in range(200)])
    argv = [f"--job.config_file={MAIN}", "--training.dataset=local", "--validation.enable"]
    argv += [f"--training.dataset_path={tmp_path}/a.jsonl"]

    def run(*more):
        sizes = ["--training.seq_len=16", "--validation.seq_len=16"]
        config = build_job_config([*argv, *sizes, *more])
        check_corpora(config, 1, "cpu")
        check_data(config, 1, "cpu")
        return config

    return run


@pytest.mark.parametrize("section", ["training", "validation"])
def test_a_part_without_one_sequence_is_refused_before_ranks_start(own, section):
    corpus = Corpus.open(ensure_prepared(own())[0].folder)
    tokens = corpus.tokens(held_out=section == "validation")
    own(f"--{section}.seq_len={tokens - 1}")
    want = f"^{section}.seq_len: got {tokens}, expected at most {tokens - 1}: .* {tokens} tokens$"
    with pytest.raises(ConfigError, match=want):
        own(f"--{section}.seq_len={tokens}")


@pytest.mark.parametrize("pattern", ["../{}", "link.jsonl"])
def test_validation_on_files_that_are_trained_on_is_refused(own, tmp_path, pattern):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    path = "--validation.dataset=local", f"--validation.dataset_path={tmp_path}"
    with pytest.raises(ConfigError, match=r"^validation\.dataset_path: got .*not trained on .*;"):
        own(path[0], f"{path[1]}/{pattern}".format(tmp_path.name))
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "other.jsonl")
    config = own(path[0], f"{path[1]}/other.jsonl")
    corpus = Corpus.open(ensure_prepared(config, "validation")[0].folder)
    assert (corpus.tokens(), corpus.tokens(held_out=True) > 100) == (0, True)


SETS = [
    ('dataset = "book"', r"\[0\]\.dataset: got 'book', expected one of training, cpython"),
    ('dataset = "local"\ndataset_path = "no.txt"', r"\[0\]\.dataset_path: got .*existing"),
    ('dataset = "local"\ndataset_path = "a.jsonl"', r"\[0\]\.dataset_path: .*not trained on"),
    ('dataset = "cpython"\ndataset_path = "a"', r"\[0\]\.dataset_path: got 'a', expected no path"),
    ('dataset = "cpython"\nsteps = 0', r"\[0\]\.steps: got 0, expected a positive integer"),
    ('dataset = "cpython"\nseq_len = 8', r"\[0\]\.seq_len: got 8, expected one of the keys "),
    ('name = "a"', r"\[0\]\.dataset: got '', expected a string"),
    ('dataset = "cpython"\nname = "a/b\\nstep 9"', r"\[0\]\.name: got 'a/b.*, expected letters, "),
    ('dataset = "cpython"\nname = "b"', r": got \['b', 'b'\], expected entries with different"),
]
HAS_FEW = 'dataset = "local"\ndataset_path = "few.txt"\nname = "c"'


def test_a_set_that_cannot_be_validated_is_refused(own, tmp_path, monkeypatch):
    (tmp_path / "few.txt").write_text("Few.")
    write_jsonl(tmp_path / "b.jsonl", ["Other lines, of one's own. " * 4] * 20)
    monkeypatch.setenv("TORCHTITAN_LR_CALLER", str(tmp_path))

    def written(*tables):
        file, head = tmp_path / "sets.toml", "\n[[validation.sets]]\n"
        file.write_text(head.join(['include = "debug_cola"', *tables]) + "\n")
        return f"--job.config_file={file}"

    good = 'dataset = "local"\ndataset_path = "b.jsonl"\nname = "b"'
    config = own(written(good, 'dataset = "training"'))
    assert [each.name for each in validation_sets(config).values()] == ["", "b", "training"]
    for table, want in SETS:
        with pytest.raises(ConfigError, match=rf"^validation\.sets{want}"):
            own(written(table, good))
    few = r"^validation.seq_len: got 16, expected at most 4: the held-out part of c .* has 5 tokens"
    with pytest.raises(ConfigError, match=few):
        own(written(good, HAS_FEW))


def test_a_warning_of_pairs_that_are_cut(own, tmp_path, caplog):
    own()
    assert not caplog.text
    records = [{"prompt": f"a{i}", "completion": " b" * 20 * (i % 2) + "c"} for i in range(60)]
    records += [{"prompt": "long " * 40, "completion": f"b{i}"} for i in range(7)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    own("--validation.no_enable")
    assert "are longer than training.seq_len = 16 and are cut" in caplog.text
    with pytest.raises(ConfigError, match=r"^training.seq_len: got 1, expected more tokens: in"):
        own("--training.seq_len=1")
