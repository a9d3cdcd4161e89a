# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where ranks meet: on one machine, and on several, of which one serves the store."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tests.support.processes import free_port
from torchtitan_lr.launch.placement import Environment
from torchtitan_lr.launch.ranks import LOOPBACK, LoopbackRendezvous, meeting, shared_store


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


def test_one_of_two_launchers_on_a_machine_serves_and_another_machine_connects():
    port = free_port()
    address = (LOOPBACK, port)
    stores = [shared_store(socket.AF_INET, address, LOOPBACK, 60) for _ in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    with pytest.raises(RuntimeError):  # nobody answers there, and it is no address of this machine
        shared_store(socket.AF_INET, ("192.0.2.1", port), "192.0.2.1", 1)


@pytest.mark.parametrize("name", ["node-1", "localhost", LOOPBACK])
def test_machines_meet_at_the_endpoint(monkeypatch, name):
    """Debian's /etc/hosts has 127.0.1.1 for a machine's own name, where others do not reach it."""
    known = socket.getaddrinfo

    def found(host, *args, **options):
        return known("127.0.1.1" if host == "node-1" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(socket, "getfqdn", lambda _=None: "node-1.net")
    monkeypatch.setenv("RDZV_CONF", "join_timeout=60,last_call_timeout=1")
    port = free_port()
    handler = meeting(Environment(1, 2, "0", "", min_nodes=1, endpoint=f"{name}:{port}"))
    assert handler._this_node.addr == ("node-1.net" if name == "node-1" else LOOPBACK)
    with socket.socket() as probe:  # another of this machine's addresses
        assert (probe.connect_ex(("127.0.0.2", port)) == 0) == (name == "node-1")
    if name == LOOPBACK:
        met = handler.next_rendezvous()
        assert (met.rank, met.world_size) == (0, 1)
    handler.shutdown()
