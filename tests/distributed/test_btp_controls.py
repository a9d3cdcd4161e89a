# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Mistakes that a bottleneck-parallel plan invites, each injected: the parity check must fail."""

import pytest

from tests.distributed.tp_cases import faulty_parity
from tests.support.parity_cases import TOLERANCE, Case
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.plans import TPSettings

NOTICED = 1e-3
"""A fault counts as noticed only far above rounding."""

SYNC = TPSettings("btp", norm="sync")
SEQUENCE = TPSettings("btp", comm="sequence")

FAULTS = {
    # fault: (case, what must differ, whether forward must still agree)
    "local_statistic": (Case("cola", SYNC), "logits", False),
    "local_statistic_online": (Case("cola"), "logits", False),
    "detached_statistic": (Case("cola"), "dx", True),
    "eps_twice": (Case("cola"), "logits", False),
    "partial_latents_cross": (Case("lax", SYNC), "logits", False),
    "gradient_of_own_heads": (Case("svd"), "dx", True),
    "own_tokens_gate_gradient": (Case("lax", SEQUENCE, gate="scalar"), "gates", True),
    "own_tokens_statistic_gradient": (Case("cola", SEQUENCE), "dx", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault: str, four_ranks: RankPool) -> None:
    case, differs, forward_agrees = FAULTS[fault]
    results = four_ranks.run(faulty_parity, case, fault)
    assert max(errors[differs] for errors in results) > NOTICED
    if forward_agrees:
        assert max(errors["logits"] for errors in results) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_the_twin_without_a_fault_is_exact(family: str, four_ranks: RankPool) -> None:
    """The faults of the online norm are injected into a twin of it, which itself is right."""
    results = four_ranks.run(faulty_parity, Case(family), "no_fault")
    assert max(max(errors.values()) for errors in results) <= 1e-12
