# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A group of gloo on an address of its own."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lr.experiments.replicas.gloo import gloo_group


def listening():
    """Addresses on which this machine listens, as in /proc: bytes in reverse."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"}


def test_a_group_listens_on_its_address_alone(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none such")  # torch's own choice would fail
    assert "0300007F" not in listening()
    group, _ = gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=10), "127.0.0.3")
    assert "0300007F" in listening()
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
