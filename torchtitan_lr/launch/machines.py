# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The machines of a run: how many there may be, how they meet, and how often they restart.

``NNODES=4`` waits for four machines. ``NNODES=2:4`` starts with two to four and goes on with fewer
when one is lost, as long as two are left. ``MAX_RESTARTS`` is how often the ranks of a machine are
started again after one has failed. torchrun counts and restarts; a restarted rank resumes from the
last complete checkpoint, as after any other interruption.

One machine, that of ``RDZV_ENDPOINT``, opens the store by which all meet; without it a run ends,
and the same command resumes it.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from typing import Any

from torchtitan_lr.checks.job import Data, check_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.environment import Environment

DEFAULT_PORT = 29400
"""torchrun's port where ``RDZV_ENDPOINT`` has none."""

_SIOCGIFADDR = 0x8915  # of Linux's <bits/ioctls.h>
_BATCH = "training.global_batch_size"


def check_machines(
    config: Any, environment: Environment, device_type: str, data: Data = "prepare"
) -> None:
    """Check the configuration for every number of machines that the run may have.

    The launchers of several machines read no file: rank 0 does, for all (`launch.check_once`).

    Args:
        config: Result of :func:`build_job_config`.
        environment: The launch's environment.
        device_type: ``cpu``, ``cuda`` or ``xpu``.
        data: As for `check_job_config`.

    Raises:
        ConfigError: The configuration cannot run, cannot be restarted, or does not fit one of the
            numbers of machines.
    """
    restarts = 0 if environment.comm_mode else environment.max_restarts
    if restarts and not config.checkpoint.enable:
        want = f"true with MAX_RESTARTS={restarts}: a restart resumes from a checkpoint"
        raise ConfigError("checkpoint.enable", False, want)
    if restarts and config.checkpoint.load_only:
        want = f"false with MAX_RESTARTS={restarts}: a restart resumes from a checkpoint"
        raise ConfigError("checkpoint.load_only", True, want)
    if restarts and config.checkpoint.load_step != -1:
        want = f"-1 with MAX_RESTARTS={restarts}: every restart would return to this step"
        raise ConfigError("checkpoint.load_step", config.checkpoint.load_step, want)
    on_paper = environment.nodes > 1
    check_job_config(config, environment.world_size, device_type, on_paper, data)
    if environment.min_nodes is None:
        return
    if config.training.global_batch_size == -1:
        want = f"a number with NNODES={environment.nodes_text}: -1 depends on the machines"
        raise ConfigError(_BATCH, -1, want)
    codec = config.grad_compression.codec
    if codec != "none":
        # Only the number of ranks that saved residuals can load them.
        want = f"none with NNODES={environment.nodes_text}, as residuals belong to ranks"
        raise ConfigError("grad_compression.codec", codec, want)
    for nodes in range(environment.nodes - 1, environment.min_nodes - 1, -1):
        try:
            check_job_config(config, environment.ranks * nodes, device_type, on_paper)
        except ConfigError as error:
            want = f"only numbers of machines that fit; {nodes} of {environment.ranks} ranks: "
            raise ConfigError("NNODES", environment.nodes_text, f"{want}{error}") from error


def rendezvous_arguments(environment: Environment) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's options for the meeting of several machines, and gloo's interface.

    torchrun decides by names whether this machine is that of ``RDZV_ENDPOINT``, and the address of
    rank 0 is its machine's name. Neither works without name resolution. Here the machine that owns
    the endpoint's address opens the store, and each passes on the address of its interface to it.
    gloo would likewise take the interface of the machine's name, which need not lead to the others;
    a cluster that sets NCCL's alone has gloo's for counts and checkpoints too.

    Returns:
        The options, and ``GLOO_SOCKET_IFNAME`` where the interface is known.
    """
    endpoint = environment.endpoint
    settings = dict(environment.rdzv_settings)
    arguments = [
        f"--nnodes={environment.nodes_text}",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={endpoint}",
        f"--rdzv_id={os.environ.get('RDZV_ID') or 'torchtitan_lr'}",
    ]
    host, port = _split(endpoint)
    gloo: dict[str, str] = {}
    with contextlib.suppress(OSError):  # an unknown name: torchrun reports it
        address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # On one machine torchrun's own way lets several launchers start at the same time.
        if not ipaddress.ip_address(address[4][0]).is_loopback and owns(host, port):
            settings.setdefault("is_host", "1")
        with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
            probe.connect(address[4])  # sends nothing, and chooses the interface on the way there
            local = str(probe.getsockname()[0])
        arguments.append(f"--local_addr={local}")
        if (interface := interface_of(local)) is not None:
            gloo["GLOO_SOCKET_IFNAME"] = interface
    if settings:
        pairs = ",".join(f"{key}={value}" for key, value in settings.items())
        arguments.append(f"--rdzv_conf={pairs}")
    return arguments, gloo


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address; None elsewhere than on Linux."""
    for _, name in socket.if_nameindex() if sys.platform == "linux" else []:
        request = struct.pack("256s", name.encode())
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with probe, contextlib.suppress(OSError):  # an interface without an address
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def owns(host: str, port: int) -> bool:
    """Return whether an address is one of this machine's and its port is free."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(address)
                return True
    return False


def _split(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[address]:port`` or ``host``."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        return endpoint.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port)
