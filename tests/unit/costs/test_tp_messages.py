# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The formulas of communication against the published numbers and the table they generalise."""

from typing import Any

import pytest

from tests.oracle.parameters import count_parameters
from torchtitan_lr.costs.tp_messages import part_traffic
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings

BS, D, F, R, D_KV = 24, 64, 160, 16, 32


def shape(family: str = "cola", **changes: Any) -> LlamaArgs:
    sizes: dict[str, Any] = {
        "dim": D,
        "n_heads": 4,
        "ffn_dim": F,
        "vocab_size": 128,
        "n_layers": 3,
        "rank_attention": 0 if family == "full" else R,
        "rank_ffn": 0 if family == "full" else R,
    }
    return LlamaArgs(family=family, **(sizes | changes))


def btp(**settings: Any) -> TPSettings:
    return TPSettings("btp", **settings)


BSD, BSF, BSR = BS * D, BS * F, BS * R

# Calls and elements, forward and then backward, of the table "collectives per decoder block".
TABLE = {
    "full": (TPSettings("megatron"), 2, 2 * BSD, 2, 2 * BSD),
    "replicated, unshared f": (
        TPSettings("vanilla_replicated", grouping=False),
        *(7, 5 * BSD + 2 * BSF),
        *(7, 6 * BSD + BSF),
    ),
    "replicated, shared f": (
        TPSettings("vanilla_replicated"),
        *(7, 5 * BSD + 2 * BSF),
        *(4, 3 * BSD + BSF),
    ),
    "fair, unshared f": (
        TPSettings("vanilla", grouping=False),
        *(8, 6 * BSD + 2 * BSF),
        *(10, 9 * BSD + BSF),
    ),
    "fair, shared f": (TPSettings("vanilla"), 8, 6 * BSD + 2 * BSF, 7, 6 * BSD + BSF),
    "ungrouped, sync": (
        btp(grouping=False, norm="sync"),
        *(9, 7 * BSR + 2 * BS),
        *(9, 7 * BSR + 2 * BS),
    ),
    "ungrouped, online": (btp(grouping=False), *(9, 7 * BSR + 2 * BS), *(7, 7 * BSR)),
    "grouped, sync": (btp(norm="sync"), 6, 7 * BSR + 2 * BS, 6, 7 * BSR + 2 * BS),
    "grouped, online": (btp(), 6, 7 * BSR + 2 * BS, 4, 7 * BSR),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row: str) -> None:
    settings, *numbers = TABLE[row]
    family = "full" if settings.plan == "megatron" else "cola"
    traffic = part_traffic(shape(family), settings, BS)["block"]
    passes = [[row for row in traffic if row.pass_ == name] for name in ("forward", "backward")]
    pairs = [(sum(r.calls for r in rows), sum(r.elements for r in rows)) for rows in passes]
    assert [*pairs[0], *pairs[1]] == numbers


@pytest.mark.parametrize(
    ("plan", "gib"), [("megatron", 0.250), ("vanilla_replicated", 1.297), ("btp", 0.219)]
)
def test_published_volumes_of_7b(plan: str, gib: float) -> None:
    """BOOST, Figure 8 (left): 7B, b = 4, s = 4096, bf16, GiB per block and forward pass."""
    family = "full" if plan == "megatron" else "cola"
    traffic = part_traffic(FLAVORS[family]["7B"], TPSettings(plan), 4 * 4096)["block"]
    elements = sum(r.elements for r in traffic if r.pass_ == "forward" and r.role == "activation")
    assert round(elements * 2 / 2**30, 3) == gib


def sum_of_linears(model: LlamaArgs) -> int:
    found = count_parameters(model)
    return found.attention + found.feed_forward


def test_data_parallel_volume() -> None:
    """BOOST, Table 6: l(11dr + 3·d_ff·r), and l(4d² + 3d·d_ff) at full rank."""
    assert sum_of_linears(shape()) == 3 * (11 * D * R + 3 * F * R)
    assert sum_of_linears(shape("full")) == 3 * (4 * D * D + 3 * D * F)
