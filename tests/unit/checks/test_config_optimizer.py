# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import json
from dataclasses import replace

import pytest

import torchtitan_lr.training.register  # noqa: F401
from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.main import main
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.entries import ENTRIES, OptimizerEntry, register_optimizer, variant

CONFIG = ROOT / "train_configs" / "debug_tsr.toml"


def check(*argv, tmp_path, world=4, file=CONFIG):
    folder = f"--job.dump_folder={tmp_path}"
    config = build_job_config([f"--job.config_file={file}", folder, *argv])
    check_job_config(config, world, "cpu", data="none")


CASES = [  # options of TSR-Adam's debug file, value as told, what would work; else accepted
    ("tsr_rank=0", "0", "an integer of at least 1"),
    ("tsr_rank=65", "65", "at most 64, the shorter side of layers.0.attention.wk.weight"),
    ("tsr_embedding_rank=129", "129", "at most 128, the shorter side of tok_embeddings"),
    ("tsr_scale=nan", "nan", "a positive number"),
    ("name=Spectron", "'Spectron'", "'Muon' or 'AdamW' for a model without low-rank"),
    ("tsr_moments=forget", "'forget'", "one of 'keep', 'rotate'"),
    ("tsr_compress_head", "", ""),
    ("tsr_rank=0 --optimizer.name=AdamW", "", ""),  # says nothing where another one trains
    ("tsr_rank=33 --model.name=llama_cola", "33", "at most 32, the shorter side of "),
    ("tsr_rank=32 --model.name=llama_cola", "", ""),
]


@pytest.mark.parametrize(("options", "got", "want"), CASES)
def test_refusals_name_key_value_and_what_works(options, got, want, tmp_path):
    given = f"--optimizer.{options}".split()
    if not want:
        check(*given, tmp_path=tmp_path)
        return
    with pytest.raises(ConfigError) as info:
        check(*given, tmp_path=tmp_path)
    text = str(info.value)
    assert text.startswith(f"{given[0][2:].partition('=')[0]}: got {got}, expected ")
    assert want in text and "\n" not in text


RATES = {"0.0009": True, "0.001": False, "0.25": False, "0.5": True}


@pytest.mark.parametrize(("lr", "warned"), RATES.items())
def test_a_rate_beyond_searches_and_papers_is_warned_of(lr, warned, tmp_path, caplog):
    given = ["--optimizer.name=Spectron", "--model.name=llama_cola", f"--optimizer.lr={lr}"]
    check(*given, tmp_path=tmp_path)
    told = [text for text in caplog.messages if text.startswith(f"optimizer.lr = {lr} is beyond")]
    assert bool(told) is warned
    assert all("0.001 to 0.25 (the paper's stable rates" in text for text in told)


@pytest.fixture
def outside():
    """Optimizers from outside: one reads no groups, one does, and two change the package's."""

    def build(*_):
        return None

    register_optimizer(OptimizerEntry("Own", build, sums_replicas=True))
    register_optimizer(OptimizerEntry("Reader", build, reads_groups=True))
    register_optimizer(variant("TSRAdam", "Variant", build))
    register_optimizer(variant("AdamW", "Changed", build))
    with pytest.raises(ValueError, match="'Own' of an optimizer is taken"):
        register_optimizer(variant("Muon", "Own", build))
    yield
    for name in ("Own", "Reader", "Variant", "Changed"):
        del ENTRIES[name]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("groups", "[{pattern = 'norm'}]"),
        ("weight_decay_on", "'matrices'"),
        ("adamw_weight_decay", "0.0"),
    ],
)
def test_rates_that_an_optimizer_from_outside_does_not_read(key, value, outside, tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text(f"include = '{CONFIG}'\n[optimizer]\n{key} = {value}\n")
    for name in ("Reader", "Variant", "TSRAdam"):
        check(f"--optimizer.name={name}", tmp_path=tmp_path, file=path)
    with pytest.raises(ConfigError) as info:
        check("--optimizer.name=Own", tmp_path=tmp_path, file=path)
    text = str(info.value)
    assert text.startswith(f"optimizer.{key}: got ") and "\n" not in text
    assert "with optimizer.name = 'Own', registered without reads_groups = True" in text


def test_an_optimizer_from_outside_refuses_by_its_own_check(outside, monkeypatch, tmp_path):
    calls = []

    def refuse(config, world_size, device_type):
        calls.append((config.optimizer.name, world_size, device_type))
        raise ConfigError("optimizer.lr", config.optimizer.lr, "another one")

    monkeypatch.setitem(ENTRIES, "Own", replace(ENTRIES["Own"], check=refuse))
    with pytest.raises(ConfigError, match=r"^optimizer\.lr: got .*, expected another one$"):
        check("--optimizer.name=Own", tmp_path=tmp_path)
    check("--optimizer.name=Reader", tmp_path=tmp_path)
    assert calls == [("Own", 4, "cpu")]


def test_an_estimate_counts_an_optimizer_from_outside_as_adamw(outside, capsys):
    """All of it, but for the sums over replicas that are the optimizer's own."""
    report = {}
    for name in ("AdamW", "Reader", "Changed", "Own"):
        arguments = [str(CONFIG), "--world=4", "--json", f"--optimizer.name={name}"]
        assert main(["estimate", *arguments, "--plans=full"]) == 0
        report[name] = json.loads(capsys.readouterr().out)["columns"]["as configured"]
    own, reader, adamw = report["Own"], report["Reader"], report["AdamW"]
    assert reader.pop("own_optimizer") == "Reader" and reader == adamw
    assert report["Changed"] == adamw | {"own_optimizer": "Changed"}
    parts = adamw["memory_bytes"].keys() - {"graphs", "peak"}  # its passes are not captured
    assert all(own["memory_bytes"][part] == adamw["memory_bytes"][part] for part in parts)
    assert own["comm_bytes"].keys() == {"fsdp"} < adamw["comm_bytes"].keys()
    assert main(["estimate", str(CONFIG), "--world=4", "--optimizer.name=Own", "--plans=full"]) == 0
    assert "as configured: Own counts as AdamW does" in capsys.readouterr().out
