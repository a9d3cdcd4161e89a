# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An optimizer from outside the package holds what those of the package hold, by its entry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.test_layout import RUN, check_sent_and_held, on_paper
from tests.support import layout_runs
from tests.support.parity_runs import EXACT, degrees, largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.estimate_report import estimate
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.hardware import load_hardware
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.entries import ENTRIES

COMMON = [*RUN, "--validation.no_enable", "--model.name=llama_cola", "--optimizer.name=FactorSOAP"]
COMMON.append("--experimental.custom_import=tests.toy_soap")
LAYOUT = degrees(tensor=2, local_batch=4)  # and FSDP over two


@pytest.fixture
def registered() -> Iterator[None]:
    yield
    ENTRIES.pop("FactorSOAP", None)


def test_soap_for_factors(
    registered: None, one_rank: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    arguments, other = [*COMMON, *LAYOUT], str(tmp_path / "other")
    alone = one_rank.run(layout_runs.run, [*COMMON, *degrees()])[0]
    ranks = four_ranks.run(layout_runs.examine, arguments, other, False)
    assert largest_difference(ranks[0], alone) < EXACT
    assert ranks[0]["resumed"] == {"difference": 0.0, "logged": True}
    assert all(rank["rejected"]["changed"] == [] for rank in ranks)
    resumed = one_rank.run(layout_runs.go_on, [*COMMON, *degrees()], other)[0]
    assert largest_difference(resumed, alone) < EXACT

    check_sent_and_held(ranks, arguments)
    paper, _ = on_paper(arguments, len(ranks))
    (sent,) = paper.optimizer.traffic(0)
    assert (sent.mesh_dim, sent.op) == ("fsdp_tp", "all_reduce")
    assert sent.elements == 2 * 2 * (4 * 12 * 13 // 2 + 3 * 20 * 21 // 2)  # blocks, A and B
    column = estimate({"soap": paper}, load_hardware("h100"))["columns"]["soap"]
    assert column["comm_bytes"]["fsdp_tp"] and "own_optimizer" not in column

    vanilla = build_job_config([*arguments, "--parallelism.tp_plan=vanilla"])
    with pytest.raises(ConfigError, match="'btp' with widths that the ranks divide"):
        check_job_config(vanilla, 4, "cpu", data="paper")
