# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A hung rank is noticed in a second group; a rank loads only what torchtitan does.

What collectives compute is in `test_layout`.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_pool import RankPool, loaded
from torchtitan_lr.compat.process_groups import second_group, set_timeouts


def waited_for_a_hung_rank(seconds: float) -> float:
    """Rank 1 does not answer in a second group; how long rank 0 waits for it."""
    second = second_group(dist.new_group())
    set_timeouts(timedelta(seconds=seconds))
    started = time.perf_counter()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=second)
    waited = time.perf_counter() - started
    set_timeouts(timedelta(minutes=30))  # of the pool's other groups
    dist.barrier()
    return waited


def test_a_hung_rank_is_noticed_in_a_second_group(two_ranks: RankPool) -> None:
    waited = two_ranks.run(waited_for_a_hung_rank, 1.0)
    assert 0.9 < waited[0] < 10 and waited[1] < 1


def test_training_loads_only_what_torchtitan_does(two_ranks: RankPool) -> None:
    """``datasets`` and what it needs are torchtitan's: its table of models imports them."""
    found = two_ranks.run(loaded)[0]
    assert {"torch", "torchtitan", "datasets"} <= found  # the check can see them
    assert not {"transformers", "matplotlib", "wandb", "tiktoken", "safetensors"} & found
