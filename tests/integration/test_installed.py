# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The wheel alone trains where this interpreter's packages are seen, but no checkout."""

import json
import tarfile
import zipfile

import pytest

from scripts import check_wheel as installed
from tests.commands import ROOT
from tests.support.pages import LINK
from torchtitan_lr.errors import RunFailedError


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def built(work):
    return installed.build(work)


@pytest.fixture(scope="module")
def programs(built, work):
    return installed.install(built[1], work / "environment", light=True)


def test_the_wheel_has_all_files_and_the_sdist_builds_the_same(built):
    sdist, wheel, again = built
    files = installed.contents(wheel)
    assert files == installed.contents(again)
    package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("torchtitan_lr/**/*.py")}
    configs = {path.name for path in ROOT.glob("train_configs/**/*.toml")}
    assert package <= set(files)
    assert configs == {name.rpartition("/")[2] for name in files if "/train_configs/" in name}
    assert "torchtitan_lr/costs/machines/h100.toml" in files
    shipped = {f"data/assets/{n}" for n in ("bpe32k/tokenizer.json", "cpython/docs.jsonl.zst")}
    assert {f"torchtitan_lr/{name}" for name in shipped} <= set(files)
    # Nothing else: no tests and no scripts.
    others = {name.split("/")[0] for name in files}
    assert others == {"torchtitan_lr", f"{wheel.name.rpartition('-py3')[0]}.dist-info"}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert "torchtitan_lr/train_configs/debug_cola.toml" in inside
    # Every link of README leads somewhere there; a package index has the description alone.
    readme = LINK.findall((ROOT / "README.md").read_text())
    assert {link.partition("#")[0] for link in readme if "://" not in link} - {""} <= inside
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in files if name.endswith("/METADATA"))
        description = archive.read(metadata).decode().partition("\n\n")[2]
    assert "torchtitan-lr train debug_cola" in description
    assert [link for link in LINK.findall(description) if "://" not in link] == []


@pytest.mark.nightly  # `python -m scripts.check_wheel` trains from it too, for every pull request
def test_it_trains_from_the_wheel(programs, work):
    folder = work / "elsewhere"
    folder.mkdir()
    said = installed.train(programs, folder, ["debug_cola", *installed.TWO_STEPS], ranks="1")
    assert "\nsteps                  2\n" in said
    summary = json.loads((folder / "outputs/debug_cola/summary.json").read_text())
    assert summary["steps"] == 2 and 5 < summary["train_loss"] < 9
    assert installed.check_origin(programs, folder, "debug_cola").startswith("2.")
    # The control: a run that read a file of the checkout is noticed.
    record = folder / "outputs/debug_cola/job_config.json"
    record.write_text(json.dumps({"job": {"config_file": f"{ROOT}/train_configs/debug_cola.toml"}}))
    with pytest.raises(RunFailedError, match="is not in"):
        installed.check_origin(programs, folder, "debug_cola")
