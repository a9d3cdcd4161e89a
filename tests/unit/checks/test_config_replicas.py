# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Refusals of ``[fault_tolerance]``: one line, before any rank starts."""

import importlib.util

import pytest

from torchtitan_lr.checks.replicas import check_replicas
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

WORKS = {
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
    ("grad_compression__codec", "sketch", "'none'"),
    ("fault_tolerance__semi_sync_method", "diloco", "synchronous"),
    ("fault_tolerance__process_group", "nccl", "'gloo'"),
    ("fault_tolerance__group_size", "0", "such as 3"),
    ("fault_tolerance__replica_id", "3", "from 0 to 2"),
    ("fault_tolerance__min_replica_size", "1", "2 to 3, a majority"),
    ("fault_tolerance__min_replica_size", "4", "2 to 3"),
    ("fault_tolerance__process_group_timeout_ms", "0", "positive"),
    ("fault_tolerance__quorum_retries", "0", "positive"),
    ("fault_tolerance__address", "8.8.8.8", "allow_public_addresses"),
    ("fault_tolerance__address", "0.0.0.0", "not all interfaces"),
    ("fault_tolerance__address", "host", "IPv4"),
    ("fault_tolerance__lighthouse", "127.0.0.1", "host:port"),
    ("fault_tolerance__lighthouse", "8.8.8.8:29510", "allow_public_addresses"),
    ("parallelism__data_parallel_replicate_degree", "2", "1 with fault_tolerance.enable"),
    ("parallelism__pipeline_parallel_degree", "2", "1 with fault_tolerance.enable"),
    ("training__global_batch_size", "32", "a multiple of 24"),
    ("comm__mode", "fake_backend", "'default'"),
    ("checkpoint__create_seed_checkpoint", "true", "fault_tolerance.no_enable"),
]


@pytest.mark.parametrize(("key", "value", "want"), REFUSED)
def test_refusals(key, value, want):
    with pytest.raises(ConfigError) as error:
        check_replicas(config(**{key: value}), 1, "cpu")
    assert error.value.key == key.replace("__", ".")
    assert want in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_untested_is_refused(ranks):
    with pytest.raises(ConfigError, match=r"^fault_tolerance\.enable: got True, .* on cuda"):
        check_replicas(config(), ranks, "cuda")


def test_the_batch_counts_the_ranks_of_a_replica(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    batch = config(training__global_batch_size="24")
    check_replicas(batch, 1, "cpu")
    with pytest.raises(ConfigError, match=r"a multiple of 48 .* x 2 data-parallel ranks"):
        check_replicas(batch, 2, "cpu")
    tensor = {"parallelism__tensor_parallel_degree": "2"}
    check_replicas(config(training__global_batch_size="24", **tensor), 2, "cpu")


@pytest.mark.parametrize("there", [True, False])
def test_torchft_is_an_extra(there, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    if there:
        return check_replicas(config(), 1, "cpu")
    with pytest.raises(ConfigError, match=r"torchtitan_lr\[ft\]"):
        check_replicas(config(), 1, "cpu")


def test_a_public_address_needs_its_key(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    allowed = {"fault_tolerance__allow_public_addresses": "true"}
    check_replicas(config(fault_tolerance__address="8.8.8.8", **allowed), 1, "cpu")
