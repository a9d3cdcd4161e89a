# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimated activations against those that two ranks keep; bytes are in `test_layout`."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.checkpointing import checkpointing
from tests.support.nightly import nightly
from tests.support.parity_cases import (
    BATCH,
    TOKENS,
    Case,
    build_model,
    model_args,
    shard_model,
    tp_mesh,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.costs.kernels import Recorder
from torchtitan_lr.costs.rehearsal import Workload, rehearse
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import resolve_settings

PLANS = [
    Case("cola", TPSettings("btp")),
    Case("lax", TPSettings("btp", comm="sequence"), dtype=torch.bfloat16),
    Case("lax", TPSettings("vanilla")),
    Case("full", TPSettings("megatron"), dtype=torch.bfloat16),
]
MODES = ("none", "selective op", "full", "low_rank")


def saved_on_rank(case: Case) -> dict[str, int]:
    """Real bytes that outlive a forward pass with its loss, by mode, on this rank."""
    tp_mesh(case.degree)
    found = {}
    for mode in MODES:
        if mode == "low_rank" and case.family == "full":
            continue
        part = build_model(case, shard_model(case))
        checkpointing(mode)(part)
        tokens = torch.ones(BATCH, TOKENS, dtype=torch.long)
        local = [p.to_local() if isinstance(p, DTensor) else p for p in part.parameters()]
        outside = {t.untyped_storage()._cdata for t in (*local, part.freqs_cis, tokens)}
        with Recorder(outside) as living:
            loss = part(tokens, targets=tokens)
            found[mode] = living.bytes() - loss.untyped_storage().nbytes()
        del loss, part, local
    return found


@pytest.mark.parametrize("case", [PLANS[1], *nightly(PLANS[0], *PLANS[2:])], ids=str)
def test_saved_activations(case: Case, two_ranks: RankPool) -> None:
    found = two_ranks.run(saved_on_rank, case)[0]
    args = model_args(case)
    settings = resolve_settings(case.settings, args, case.degree, TOKENS)
    estimates = {}
    for mode in found:
        workload = Workload(args, settings, case.degree, BATCH, TOKENS, case.dtype)
        part = rehearse(workload, checkpointing(mode))
        estimates[mode] = args.n_layers * part.block + part.ends
        assert estimates[mode] == pytest.approx(found[mode], rel=0.05)
    # The control: one mode's estimate is not another's.
    assert estimates["none"] != pytest.approx(found["full"], rel=0.05)
