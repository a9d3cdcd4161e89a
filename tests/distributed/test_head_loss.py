# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The head's loss over vocabulary shards, in chunks, is that of one process."""

from unittest.mock import patch

import pytest

from tests.distributed.tp_cases import fully_shard_blocks, worst
from tests.support.parity_cases import Case, one_process, parity
from tests.support.rank_pool import RankPool
from torchtitan_lr.models import ends as head_loss
from torchtitan_lr.parallel.plan_parts import TPSettings

CASES = {
    "features": Case("cola", TPSettings("btp")),
    "features, FSDP": Case("cola", TPSettings("btp"), degree=2),
    "tokens": Case("full", TPSettings("megatron", comm="sequence")),
    "two lanes on a rank": Case("full", TPSettings("caat"), degree=2, lanes=4, fraction=0.5),
}


def errors_in_chunks(case: Case) -> dict[str, float]:
    """Run a case in chunks of five of its sixteen tokens; on a rank."""
    one_process(case)
    wrappers = (fully_shard_blocks,) if case.degree == 2 and case.lanes == 1 else ()
    with patch.object(head_loss, "chunk_tokens", lambda tokens, dim: 5):
        return parity(case, *wrappers)


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_vocabulary_shards(name: str, four_ranks: RankPool) -> None:
    errors = four_ranks.run(errors_in_chunks, CASES[name])
    assert worst(errors) <= 1e-12
