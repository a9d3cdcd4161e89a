# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run will write, asked before it starts."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.config_checks import MAIN, check, refusal, without_privileges
from torchtitan_lr.checks.values import check_dump_folder
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError


def judge(folder, *options):
    config = build_job_config(
        [f"--job.config_file={MAIN}", f"--job.dump_folder={folder}", *options]
    )
    check_dump_folder(config, 4, "cpu")
    return config


BLOCKED_FOLDERS = [
    # key, its value, what makes the run write there
    ("checkpoint.folder", "checkpoint", "--checkpoint.enable"),
    ("metrics.save_tb_folder", "tb", "--metrics.enable_tensorboard"),
    ("comm.save_traces_folder", "comm_traces", "--comm.trace_buf_size=1"),
]


@pytest.mark.parametrize(("key", "name", "option"), BLOCKED_FOLDERS)
def test_a_file_in_a_folders_place_is_refused(tmp_path, key, name, option):
    blocking = tmp_path / Path(name).parts[0]
    blocking.write_text("")
    options = [option, f"--{key}={name}"]
    with pytest.raises(ConfigError) as info:
        judge(tmp_path, *options)
    want = f"a folder that {blocking} does not block: it is a file"
    assert str(info.value) == f"{key}: got {name!r}, expected {want}"
    # The control: with a folder in that place the run may start.
    blocking.unlink()
    blocking.mkdir()
    judge(tmp_path, *options)


@pytest.mark.parametrize("name", ["metrics.jsonl", "job_config.json", "mine.json"])
def test_a_folder_in_a_files_place_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    option = ["--job.save_config_file=mine.json"] if name == "mine.json" else []
    with pytest.raises(ConfigError) as info:
        judge(tmp_path, *option)
    assert str(info.value).startswith(f"job.dump_folder: got '{tmp_path}', expected a folder in ")
    assert name in str(info.value)
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("")
    judge(tmp_path, *option)


def test_dump_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    text = refusal(f"--job.dump_folder={tmp_path}/file/below")
    assert text.startswith(f"job.dump_folder: got '{tmp_path}/file/below', expected a folder")


@pytest.mark.skipif(
    sys.platform != "linux" and os.geteuid() == 0, reason="root may write everywhere"
)
def test_dump_folder_without_permission(tmp_path):
    closed, hidden = tmp_path / "closed", tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "run").mkdir()
    closed.mkdir(0o500)
    argv = f"--job.dump_folder={closed}/out"
    text = without_privileges(lambda: refusal(argv))
    assert text.startswith("job.dump_folder: got ") and f"a folder that {closed} lets" in text
    hidden.chmod(0)
    text = without_privileges(lambda: refusal(f"--job.dump_folder={hidden}/run"))
    assert text.startswith("job.dump_folder: got ") and "(Permission denied)" in text
    # The control: nothing but the permission was in the way.
    for folder in (closed, hidden):
        folder.chmod(0o700)
    without_privileges(lambda: check(argv))
    without_privileges(lambda: check(f"--job.dump_folder={hidden}/run"))
