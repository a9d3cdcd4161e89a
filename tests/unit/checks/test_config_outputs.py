# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run will write, asked before it starts."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.config_checks import MAIN, check, refusal, without_privileges
from torchtitan_lr.checkpoints.folders import RUN_FILES
from torchtitan_lr.checks.values import check_dump_folder
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import LOCK_FILE
from torchtitan_lr.launch.run_state import STATE_FILE
from torchtitan_lr.training.history import CURVE_FILE, HISTORY_FILE, SUMMARY_FILE
from torchtitan_lr.training.metrics import WANDB_ID_FILE


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


@pytest.mark.parametrize("name", ["metrics.jsonl", "./run.lock", "logs", "checkpoint"])
def test_a_record_replaces_no_other_file(tmp_path, name):
    with pytest.raises(ConfigError, match=f"^job.save_config_file: got '{name}', expected a file"):
        judge(tmp_path, f"--job.save_config_file={name}")
    with pytest.raises(ConfigError, match=r"^job\.save_config_file: got '/"):
        judge(tmp_path, f"--job.save_config_file={tmp_path / name}")
    judge(tmp_path, "--job.save_config_file=logs/config.json")
    assert {HISTORY_FILE, SUMMARY_FILE, CURVE_FILE, STATE_FILE, LOCK_FILE, WANDB_ID_FILE} <= {
        *RUN_FILES
    }


def test_what_may_not_be_written_is_refused(tmp_path):
    (tmp_path / "tb").mkdir(0o500)
    (tmp_path / "metrics.jsonl").touch(0o400)
    for key in ("metrics.save_tb_folder", "job.dump_folder"):
        with pytest.raises(ConfigError) as info:
            without_privileges(lambda: judge(tmp_path, "--metrics.enable_tensorboard"))
        assert str(info.value).startswith(f"{key}: got ")
        (tmp_path / "tb").chmod(0o700)
    (tmp_path / "metrics.jsonl").chmod(0o600)
    without_privileges(lambda: judge(tmp_path, "--metrics.enable_tensorboard"))


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
