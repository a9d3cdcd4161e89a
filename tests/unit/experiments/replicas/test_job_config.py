# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Refusals of ``[fault_tolerance]``: one line, before any rank starts."""

import importlib.util

import pytest

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.replicas.job_config import check, complete

pytestmark = pytest.mark.nightly

MODULE = "torchtitan_lr.experiments.replicas.job_config"
WORKS = {
    "job.custom_config_module": MODULE,
    "fault_tolerance.enable": "true",
    "fault_tolerance.group_size": "3",
    "fault_tolerance.min_replica_size": "2",
    "optimizer.name": "TSRAdam",
}


def config(**changes):
    options = WORKS | {key.replace("__", "."): value for key, value in changes.items()}
    flags = [f"--{key}={value}" for key, value in options.items() if value != "true"]
    return build_job_config([*flags, *(f"--{k}" for k, v in options.items() if v == "true")])


REFUSED = [
    ("optimizer__name", "AdamW", "'TSRAdam'"),
    ("fault_tolerance__semi_sync_method", "diloco", "synchronous"),
    ("fault_tolerance__group_size", "0", "such as 3"),
    ("fault_tolerance__replica_id", "3", "from 0 to 2"),
    ("fault_tolerance__min_replica_size", "1", "2 to 3, a majority"),
    ("fault_tolerance__address", "8.8.8.8", "not protected"),
    ("fault_tolerance__lighthouse", "8.8.8.8:29510", "not protected"),
    ("parallelism__data_parallel_replicate_degree", "2", "1 with fault_tolerance.enable"),
    ("training__global_batch_size", "32", "a multiple of 24"),
]


@pytest.mark.parametrize(("key", "value", "want"), REFUSED)
def test_refusals(key, value, want):
    with pytest.raises(ConfigError) as error:
        check(config(**{key: value}), 1, "cpu")
    assert error.value.key == key.replace("__", ".")
    assert want in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_untested_is_refused(ranks):
    with pytest.raises(ConfigError, match=r"^fault_tolerance\.enable: got True, .* on cuda"):
        check(config(), ranks, "cuda")


def test_the_batch_counts_the_ranks_of_a_replica(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    batch = config(training__global_batch_size="24")
    check(batch, 1, "cpu")
    with pytest.raises(ConfigError, match=r"a multiple of 48 .* x 2 data-parallel ranks"):
        check(batch, 2, "cpu")
    tensor = {"parallelism__tensor_parallel_degree": "2"}
    check(config(training__global_batch_size="24", **tensor), 2, "cpu")


@pytest.mark.parametrize("there", [True, False])
def test_torchft_is_an_extra(there, monkeypatch):
    replica = config()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    if there:
        return check(replica, 1, "cpu")
    with pytest.raises(ConfigError, match=r"torchtitan_lr\[ft\]"):
        check(replica, 1, "cpu")


def test_a_replica_is_one_machine(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    with pytest.raises(ConfigError, match=r"^NNODES: got '2', expected 1 with fault_tolerance"):
        check(config(), 1, "cpu")


def test_each_replica_has_a_folder_and_all_share_the_checkpoints(tmp_path):
    own = config(job__dump_folder=str(tmp_path / "run"), fault_tolerance__replica_id="2")
    assert own.job.dump_folder == str(tmp_path / "run/replica_2")
    assert own.checkpoint.folder == str(tmp_path / "run/checkpoint")
    record = tmp_path / "run/replica_2" / own.job.save_config_file
    assert record.resolve().parent == tmp_path / "run"
    complete(own)  # again, as when the record is read
    assert own.job.dump_folder == str(tmp_path / "run/replica_2")


def test_only_experiments_extend_a_run():
    with pytest.raises(ConfigError, match=r"job\.custom_config_module: got 'json', expected"):
        build_job_config(["--job.custom_config_module=json"])
    with pytest.raises(ConfigError, match=r"fault_tolerance\.group_size"):
        build_job_config(["--fault_tolerance.group_size=two"])
    plain = build_job_config(["--fault_tolerance.enable"])
    with pytest.raises(ConfigError, match=r"^fault_tolerance\.enable: got True, .*" + MODULE):
        check_job_config(plain, 1, "cpu")
