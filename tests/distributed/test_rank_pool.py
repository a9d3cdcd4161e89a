# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The pool of ranks itself: one that dies fails one test, and not all after it."""

import os
import signal

import pytest

from tests.support.rank_pool import RankPool


def test_a_rank_that_died_between_two_tests_is_named_and_replaced() -> None:
    pool = RankPool(2)
    before = pool.run(os.getpid)
    os.kill(before[1], signal.SIGKILL)  # as a machine without memory does
    pool._ranks[1][0].join()
    with pytest.raises(RuntimeError, match="rank 1:\nthe process died, exit code -9"):
        pool.run(os.getpid)
    assert set(pool.run(os.getpid)).isdisjoint(before)
    pool.close()
