# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of ``[fault_tolerance]`` before any rank starts."""

import importlib.util
import ipaddress
from typing import Any

from torchtitan_lr.config.methods import TSR
from torchtitan_lr.errors import ConfigError

_SECTION = "fault_tolerance"


def check_replicas(config: Any, world_size: int, device_type: str) -> None:
    """Check what replicas that come and go need; do nothing without them."""
    section = config.fault_tolerance
    if not section.enable:
        return
    _check_methods(config)
    _check_ranks(config, world_size, device_type)
    _check_numbers(config)
    _check_batch(config, world_size)
    check_address(section.address, f"{_SECTION}.address", section.allow_public_addresses)
    split_endpoint(section.lighthouse, f"{_SECTION}.lighthouse", section.allow_public_addresses)
    if importlib.util.find_spec("torchft") is None:
        want = "false, or torchft (pip install 'torchtitan_lr[ft]')"
        raise ConfigError(f"{_SECTION}.enable", True, want)


def _check_methods(config: Any) -> None:
    """Refuse what does not reduce the gradients of replicas that come and go."""
    section = config.fault_tolerance
    if config.optimizer.name != TSR:
        want = f"{TSR!r} with fault_tolerance.enable: no other optimizer reduces by itself"
        raise ConfigError("optimizer.name", config.optimizer.name, want)
    if config.grad_compression.codec != "none":
        want = "'none' with fault_tolerance.enable"
        raise ConfigError("grad_compression.codec", config.grad_compression.codec, want)
    if section.semi_sync_method is not None:
        want = "nothing: the quorum is synchronous, once per step"
        raise ConfigError(f"{_SECTION}.semi_sync_method", section.semi_sync_method, want)
    if section.process_group != "gloo":
        want = "'gloo': NCCL is untested with replicas that come and go"
        raise ConfigError(f"{_SECTION}.process_group", section.process_group, want)


def _check_ranks(config: Any, world_size: int, device_type: str) -> None:
    parallelism = config.parallelism
    for name in ("data_parallel_replicate_degree", "pipeline_parallel_degree"):
        degree = getattr(parallelism, name)
        if degree > 1:
            raise ConfigError(f"parallelism.{name}", degree, "1 with fault_tolerance.enable")
    if config.comm.mode != "default":
        want = "'default' with fault_tolerance.enable: a dry run has no quorum"
        raise ConfigError("comm.mode", config.comm.mode, want)
    if config.checkpoint.create_seed_checkpoint:
        want = "false with fault_tolerance.enable: make it with --fault_tolerance.no_enable"
        raise ConfigError("checkpoint.create_seed_checkpoint", True, want)
    if device_type != "cpu":
        want = f"false on {device_type}: only CPU replicas were tested"
        raise ConfigError(f"{_SECTION}.enable", True, want)


def _check_numbers(config: Any) -> None:
    section = config.fault_tolerance
    size, least = section.group_size, section.min_replica_size
    if size < 1:
        want = "the largest number of replicas, such as 3"
        raise ConfigError(f"{_SECTION}.group_size", size, want)
    if not 0 <= section.replica_id < size:
        want = f"a number from 0 to {size - 1}, another for every replica"
        raise ConfigError(f"{_SECTION}.replica_id", section.replica_id, want)
    majority = size // 2 + 1
    if not majority <= least <= size:
        want = (
            f"{majority} to {size}, a majority of group_size: with fewer, two halves of a cut "
            "network would train on"
        )
        raise ConfigError(f"{_SECTION}.min_replica_size", least, want)
    timeouts = ("process_group_timeout_ms", "quorum_timeout_s", "heal_timeout_s", "quorum_retries")
    for name in timeouts:
        if getattr(section, name) < 1:
            raise ConfigError(f"{_SECTION}.{name}", getattr(section, name), "a positive integer")


def _check_batch(config: Any, world_size: int) -> None:
    ranks = max(1, world_size // max(1, config.parallelism.tensor_parallel_degree))
    unit = config.training.local_batch_size * config.fault_tolerance.group_size * ranks
    batch = config.training.global_batch_size
    if batch != -1 and batch % unit:
        each = "" if ranks == 1 else f" x {ranks} data-parallel ranks of a replica"
        want = f"a multiple of {unit} (local_batch_size x fault_tolerance.group_size{each}), or -1"
        raise ConfigError("training.global_batch_size", batch, want)


def check_address(text: str, key: str, public: bool) -> None:
    """Raise for an address that is not a literal IPv4 address, loopback or private.

    Args:
        text: The address.
        key: The TOML key or option, for the error.
        public: Whether others are accepted too.

    Raises:
        ConfigError: It is not, or it stands for all interfaces.
    """
    want = "a loopback or private IPv4 address of this machine such as 127.0.0.1 or 10.0.0.7"
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise ConfigError(key, text, want) from None
    if address.is_unspecified:
        raise ConfigError(key, text, f"{want}, not all interfaces")
    if not (public or address.is_loopback or address.is_private):
        want = f"{want}, or {_SECTION}.allow_public_addresses = true: the ports are not protected"
        raise ConfigError(key, text, want)


def split_endpoint(text: str, key: str, public: bool) -> tuple[str, int]:
    """Return host and port of ``host:port``, after `check_address`; arguments as there."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(key, text, "host:port such as 127.0.0.1:29510")
    check_address(host, key, public)
    return host, int(port)
