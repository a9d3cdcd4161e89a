# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All ranks leave an agreement with the same answer, the one that one process would compute."""

import torch.distributed as dist

from tests.support.rank_pool import RankPool
from torchtitan_lr.agreement import first_rank_with, from_all_ranks, from_first_rank


def answers(texts: list[str | None]) -> list[object]:
    """Every agreement about a list's text of this rank; on a rank."""
    text = texts[dist.get_rank()]
    return [from_first_rank(text), from_all_ranks(text), first_rank_with(text)]


def test_all_ranks_have_one_answer(four_ranks: RankPool) -> None:
    texts = [None, "NaN", "x" * 1000, None]
    assert four_ranks.run(answers, texts) == [[None, texts, (1, "NaN")]] * 4
    # An empty text is one.
    assert four_ranks.run(answers, [None, None, None, ""])[0][2] == (3, "")
    assert four_ranks.run(answers, [None] * 4)[0][2] is None
