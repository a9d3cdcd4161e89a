# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where ranks meet: on one machine, and on several, of which one serves the store."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from torchtitan_lr.launch.environment import Environment
from torchtitan_lr.launch.rendezvous import (
    LoopbackRendezvous,
    interface_of,
    meeting,
    shared_store,
)

LOOPBACK = "127.0.0.1"


def free_port():
    with socket.create_server((LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]


def test_ranks_of_one_machine_meet_at_the_launchers_store():
    rendezvous = LoopbackRendezvous()
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    where = second.bootstrap_store_info
    assert (second.rank, second.world_size, where.master_addr) == (0, 1, LOOPBACK)
    assert where.master_port != first.bootstrap_store_info.master_port  # of each start
    # As a rank: torchrun hands it the address and that there is a store already.
    assert rendezvous.use_agent_store
    rank = TCPStore(where.master_addr, where.master_port, timeout=timedelta(seconds=60))
    rank.set("none/key", "value")
    assert second.store.get("key") == b"value"


@pytest.fixture
def own_name(monkeypatch):
    """A name that a machine has for itself alone, as Debian's /etc/hosts has."""
    known = socket.getaddrinfo

    def found(host, *args, **options):
        return known("127.0.1.1" if host == "node-1" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return "node-1"


@pytest.mark.parametrize("name", [LOOPBACK, "localhost"])
def test_one_of_two_launchers_on_a_machine_serves(name):
    port = free_port()
    stores = [shared_store(name, port, 60) for _ in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", port))


@pytest.mark.parametrize(("address", "hosts"), [("192.0.2.1", None), (LOOPBACK, False)])
def test_another_machine_connects(address, hosts):
    port = free_port()
    with pytest.raises(RuntimeError):
        shared_store(address, port, 1, hosts)
    with socket.create_server(("", port)) as unused:  # it was not served here
        assert unused.getsockname()[1] == port


def reaches(address, port):
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def test_a_machines_own_name_is_met_by_the_others(own_name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex(("198.51.100.1", 9)):
            pytest.skip("has no network")
        outside = probe.getsockname()[0]
    for name, address in ((own_name, outside), ("localhost", LOOPBACK)):
        port = free_port()
        two = Environment(1, 2, "0", "", "m", min_nodes=1, endpoint=f"{name}:{port}")
        handler, variables = meeting(two)
        assert handler._this_node.addr == address
        assert variables == {"GLOO_SOCKET_IFNAME": interface_of(address)}
        assert reaches(outside, port) == (name == own_name)
        handler.shutdown()


def test_machines_meet_at_the_endpoint():
    endpoint = f"{LOOPBACK}:{free_port()}"
    settings = (("join_timeout", "60"), ("last_call_timeout", "1"))
    two = Environment(1, 2, "0", "", "m", min_nodes=1, rdzv_settings=settings, endpoint=endpoint)
    handler, variables = meeting(two)
    assert variables == {"GLOO_SOCKET_IFNAME": "lo"}  # of the address, whatever the name is
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 1)
    handler.shutdown()
