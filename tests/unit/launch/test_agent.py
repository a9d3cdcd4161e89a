# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rendezvous of one machine, and how long ranks may take to end."""

import signal
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from torchtitan_lr.launch import agent


@pytest.fixture
def rendezvous():
    parameters = RendezvousParameters("loopback", "", "run", 1, 1, timeout=60)
    return agent.LoopbackRendezvous(parameters)


def test_ranks_meet_at_the_store_of_the_agent(rendezvous):
    info = rendezvous.next_rendezvous()
    where = info.bootstrap_store_info
    assert (info.rank, info.world_size, where.master_addr) == (0, 1, "127.0.0.1")
    # As a rank: torchrun hands it the address and that there is a store already.
    assert rendezvous.use_agent_store
    rank = TCPStore(where.master_addr, where.master_port, timeout=timedelta(seconds=60))
    rank.set("run/key", "value")
    assert info.store.get("key") == b"value"


def test_two_launches_never_get_the_same_port(rendezvous):
    other = agent.LoopbackRendezvous(RendezvousParameters("loopback", "", "other", 1, 1))
    ports = {r.next_rendezvous().bootstrap_store_info.master_port for r in (rendezvous, other)}
    assert len(ports) == 2
    for port in ports:  # taken before anybody knows its number
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


@pytest.mark.parametrize(("asked", "given"), [(30, agent.GRACE_SECONDS), (1, 1)])
def test_ranks_that_are_left_have_little_time(monkeypatch, asked, given):
    calls = []
    monkeypatch.setattr(agent, "close_ranks", lambda *values: calls.append(values))
    context = SimpleNamespace(subprocess_handlers={})
    agent._close_soon(context, signal.SIGTERM, asked)
    assert calls == [(context, signal.SIGTERM, given)]
    assert agent.GRACE_SECONDS < 5
