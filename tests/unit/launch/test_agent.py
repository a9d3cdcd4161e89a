# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rendezvous of one machine, and how long ranks may take to end."""

import signal
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


@pytest.mark.parametrize(("asked", "given"), [(30, agent.GRACE_SECONDS), (1, 1)])
def test_ranks_that_are_left_have_little_time(monkeypatch, asked, given):
    calls = []
    monkeypatch.setattr(agent, "close_ranks", lambda *values: calls.append(values))
    context = SimpleNamespace(subprocess_handlers={})
    agent.Ranks().close(context, signal.SIGTERM, asked)
    assert calls == [(context, signal.SIGTERM, given)]
    assert agent.GRACE_SECONDS < 5


def process(status):
    return SimpleNamespace(proc=SimpleNamespace(poll=lambda: status, pid=1))


@pytest.mark.parametrize(
    ("statuses", "cause", "seconds"),
    [
        # Nobody failed: they may save.
        ((None, None), "the machines of the run changed", 30),
        ((None, 1), "rank 1 failed with status 1", agent.GRACE_SECONDS),
        ((1, -9, 1), "rank 1 was ended by SIGKILL", agent.GRACE_SECONDS),
    ],
)
def test_a_killed_rank_is_the_cause(monkeypatch, statuses, cause, seconds):
    given = []
    monkeypatch.setattr(agent, "close_ranks", lambda *values: given.append(values[1:]))
    ranks = agent.Ranks()
    context = SimpleNamespace(subprocess_handlers=dict(enumerate(map(process, statuses))))
    ranks.close(context, signal.SIGTERM, timeout=30)
    number = signal.SIGUSR2 if seconds == 30 else signal.SIGTERM  # they will start again
    assert (ranks.cause, given) == (cause, [(number, seconds)])


@pytest.mark.parametrize(("status", "ends"), [(2, True), (3, True), (1, False), (-9, False)])
def test_what_would_come_again_is_not_restarted(monkeypatch, status, ends):
    """A refusal, and a loss that is not finite; torchrun would end with 1 in any case."""
    monkeypatch.setattr(agent, "close_ranks", lambda *_: None)
    stopped = []  # else torchrun's interpreter waits for the threads that copy the output
    monkeypatch.setattr(agent, "stop_copying", stopped.append)
    ranks = agent.Ranks()
    context = SimpleNamespace(subprocess_handlers={0: process(1), 1: process(status)})
    if ends:
        with pytest.raises(SystemExit) as info:
            ranks.close(context, signal.SIGTERM)
        assert info.value.code == status
    else:
        ranks.close(context, signal.SIGTERM)
    assert stopped == [context] * ends


STARTED = {
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "GROUP_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "RANK": "2",
    "LOCAL_RANK": "0",
}


def test_a_restart_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr(agent.subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=7))
    ranks = agent.Ranks()
    ranks.popen(["x"], env=STARTED)
    started = "process 7 started as rank {0} (local_rank: {1})"
    assert capfd.readouterr().err.splitlines() == [started.format(2, 0)]  # the first start is none
    ranks.cause = "rank 3 was ended by SIGKILL"
    for rank in range(2):
        ranks.popen(["x"], env=STARTED | {"RANK": str(2 + rank), "LOCAL_RANK": str(rank)})
    line, *rest = capfd.readouterr().err.splitlines()
    assert rest == [started.format(2, 0), started.format(3, 1)]
    what = "rank 3 was ended by SIGKILL; 2 machines, 4 ranks"
    assert line == f"restart (1 of 3 after failures): {what}"
