# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The key ``include``: a file over another one."""

import pytest

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def test_the_including_file_wins_key_by_key(write):
    write("base/a.toml", '[training]\nsteps = 1\nseq_len = 8\n[metrics]\nwandb_tags = ["a", "b"]\n')
    write("b.toml", 'include = "base/a.toml"\n[training]\nsteps = 2\n[optimizer]\nlr = 0.5\n')
    top = write("c.toml", 'include = "b.toml"\n[metrics]\nwandb_tags = ["c"]\n')
    # The control: the other order would give 1 step, and joined arrays three tags.
    assert load_toml(top) == {
        "training": {"steps": 2, "seq_len": 8},
        "metrics": {"wandb_tags": ["c"]},
        "optimizer": {"lr": 0.5},
    }
    config = build_job_config([f"--job.config_file={top}", "--training.seq_len=16"])
    assert (config.training.steps, config.training.seq_len) == (2, 16)


@pytest.mark.parametrize("name", ["debug_cola", "debug_cola.toml", "train_configs/debug_cola.toml"])
def test_a_shipped_file_is_included_by_its_name(write, name):
    shipped = load_toml("train_configs/debug_cola.toml")
    top = write("a.toml", f'include = "{name}"\n[training]\nsteps = 2\n')
    assert load_toml(top) == shipped | {"training": shipped["training"] | {"steps": 2}}
    write(name, "[training]\nseq_len = 9\n")  # a neighbour comes first
    assert load_toml(top) == {"training": {"steps": 2, "seq_len": 9}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('include = "debug_coal.toml"', "or a shipped one: did you mean debug_cola"),
        ('include = "none.toml"', "got 'none.toml', expected a TOML file, relative to "),
        ('include = "a.toml"', "got 'a.toml', expected a file that does not lead back"),
        ('include = "b.toml"', "got 'a.toml', expected a file that does not lead back"),
    ],
)
def test_refusals_name_the_file_and_the_key(write, text, message):
    write("b.toml", 'include = "a.toml"\n')
    top = write("a.toml", text + "\n[training]\nsteps = 1\n")
    with pytest.raises(ConfigError) as info:
        load_toml(top)
    assert str(info.value).startswith("include of ") and message in str(info.value)


def test_an_unknown_key_of_an_included_file_is_refused(write):
    write("a.toml", "[training]\nstpes = 1\n")
    top = write("b.toml", 'include = "a.toml"\n[training]\nseq_len = 8\n')
    with pytest.raises(ConfigError, match=r"^training\.stpes: got 1"):
        build_job_config([f"--job.config_file={top}"])
