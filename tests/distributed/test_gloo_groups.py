# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A member that has lost a step closes its connections, so that no other waits for the timeout."""

import time
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.gloo import GlooConnections

pytest.importorskip("torchft", reason="torchft is not installed (the extra `ft`)")

TIMEOUT = 5.0


def seconds_until_lost(port: int, closes: bool) -> float:
    """Sum with three others, one of which ends; return the time until the step is lost."""
    from torchtitan_lr.replicas.group import ReplicaGroup

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = ReplicaGroup(timedelta(seconds=TIMEOUT), "127.0.0.1")
    group.configure(f"127.0.0.1:{port}/{closes}", str(rank), rank, ranks)
    options = dist.AllreduceOptions()
    first = torch.ones(8)
    group.allreduce([first], options).wait()
    assert group.failure is None and first.tolist() == [ranks] * 8
    begin = time.perf_counter()
    if rank == ranks - 1:
        group._connections.shut()  # as the kernel does for a process that dies
    else:
        with nullcontext() if closes else patch.object(GlooConnections, "shut"):
            group.allreduce([torch.ones(8)], options).wait()
        assert group.failure is not None
    seconds = time.perf_counter() - begin
    dist.all_reduce(torch.ones(1))  # connections of other groups are left alone
    return seconds


@pytest.mark.parametrize("closes", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_no_member_waits_for_one_that_has_given_up(closes: bool, four_ranks: RankPool) -> None:
    """In gloo's ring of four, one member waits for another that lives."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    seconds = four_ranks.run(seconds_until_lost, store.port, closes)
    assert (max(seconds) < TIMEOUT / 2) == closes, seconds
