# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The formulas of communication against the published numbers and the table they generalise."""

from dataclasses import replace
from typing import Any

import pytest

from torchtitan_lr.formulas.communication import (
    block_traffic,
    embedding_traffic,
    head_traffic,
    loss_traffic,
    model_traffic,
)
from torchtitan_lr.formulas.data_parallel import (
    DataParallel,
    data_parallel_traffic,
    padded,
)
from torchtitan_lr.formulas.parameters import count_parameters
from torchtitan_lr.formulas.traffic import Traffic, count, merge
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.tensor.plans import TPSettings

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
    "ungrouped, online": (
        btp(grouping=False, norm_stat="column"),
        *(7, 7 * BSR + 2 * BS),
        *(7, 7 * BSR),
    ),
    "grouped, sync": (btp(norm="sync"), 6, 7 * BSR + 2 * BS, 6, 7 * BSR + 2 * BS),
    "grouped, online": (btp(norm_stat="column"), 4, 7 * BSR + 2 * BS, 4, 7 * BSR),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row: str) -> None:
    settings, *numbers = TABLE[row]
    family = "full" if settings.plan == "megatron" else "cola"
    traffic = block_traffic(shape(family), settings, BS, column_multiple=1)
    assert [*count(traffic, "forward"), *count(traffic, "backward")] == numbers


def test_rows_of_the_table_differ() -> None:
    counts = {tuple(numbers) for _, *numbers in TABLE.values()}
    assert len(counts) == len(TABLE)


@pytest.mark.parametrize("grouping", [True, False])
def test_async_statistic_is_one_call_more_per_norm(grouping: bool) -> None:
    column = block_traffic(shape(), btp(grouping=grouping, norm_stat="column"), BS, False, 1)
    hidden = block_traffic(shape(), btp(grouping=grouping), BS)
    calls, elements = count(column, "forward")
    assert count(hidden, "forward") == (calls + 2, elements)
    assert count(hidden, "backward") == count(column, "backward")
    assert {r.role for r in hidden} == {"activation", "statistic"}
    assert {r.role for r in column} == {"activation"}


@pytest.mark.parametrize(
    ("grouping", "padding"), [(True, (8, 8)), (False, (8, 8))], ids=["grouped", "ungrouped"]
)
def test_column_is_padded(grouping: bool, padding: tuple[int, int]) -> None:
    # 3·16 + 1 and 2·16 + 1, or 16 + 1 twice, rounded up to multiples of 8: 7 more than the column.
    traffic = block_traffic(shape(), btp(grouping=grouping, norm_stat="column"), BS)
    assert count(traffic, "forward")[1] == 7 * BSR + sum(padding) * BS


def test_grouped_query_attention_shortens_k_and_v() -> None:
    gqa = shape(n_kv_heads=2)
    kv = BS * D_KV
    for plan, forward in (
        ("vanilla", 4 * BSD + 2 * kv + 2 * BSF),
        ("vanilla_replicated", 3 * BSD + 2 * kv + 2 * BSF),
    ):
        assert count(block_traffic(gqa, TPSettings(plan), BS), "forward")[1] == forward
    fair = block_traffic(gqa, TPSettings("vanilla"), BS)
    assert count(fair, "backward") == (7, 4 * BSD + 2 * kv + BSF)
    assert block_traffic(gqa, btp(), BS) == block_traffic(shape(), btp(), BS)


def by_op(traffic: list[Traffic], pass_: str) -> dict[tuple[str, str], tuple[int, int]]:
    rows = [r for r in merge(traffic) if r.pass_ == pass_]
    return {(r.op, r.role): (r.calls, r.elements) for r in rows}


def test_token_shards_in_rank_space() -> None:
    traffic = block_traffic(shape(), btp(comm="sequence"), BS)
    assert by_op(traffic, "forward") == {
        ("reduce_scatter", "activation"): (4, 7 * BSR),
        ("all_gather", "activation"): (4, 7 * BSR),
        ("reduce_scatter", "statistic"): (2, 2 * BS),
    }
    assert by_op(traffic, "backward") == {
        ("reduce_scatter", "activation"): (4, 7 * BSR),
        ("all_gather", "activation"): (4, 7 * BSR),
        ("all_gather", "statistic"): (2, 2 * BS),
    }


def test_token_shards_at_full_rank() -> None:
    traffic = block_traffic(shape("full"), TPSettings("megatron", comm="sequence"), BS)
    halves = {(op, "activation"): (2, 2 * BSD) for op in ("all_gather", "reduce_scatter")}
    assert by_op(traffic, "forward") == halves
    assert by_op(traffic, "backward") == halves | {("all_reduce", "activation"): (2, 2 * D)}


@pytest.mark.parametrize("comm", ["all_reduce", "sequence"])
def test_learned_gates_on_shards(comm: str) -> None:
    lax = shape("lax", lax_gate="scalar")
    settings = btp(comm=comm)
    first, later = (block_traffic(lax, settings, BS, first_block=f) for f in (True, False))
    more = (4, 7) if comm == "sequence" else (0, 0)
    calls, elements = count(first, "backward")
    assert count(later, "backward") == (calls + more[0], elements + more[1])
    assert first == block_traffic(shape("cola"), settings, BS)


def test_heads() -> None:
    plain = head_traffic(shape(), btp(), BS)
    assert by_op(plain, "forward") == {("all_gather", "activation"): (1, BSD)}
    assert by_op(plain, "backward") == {("all_reduce", "activation"): (1, BSD)}
    scatter = head_traffic(shape(), btp(head="scatter"), BS)
    assert by_op(scatter, "forward") == {
        ("all_gather", "activation"): (1, BSD),
        ("all_reduce", "statistic"): (1, BS),
    }
    assert by_op(scatter, "backward") == {
        ("reduce_scatter", "activation"): (1, BSD),
        ("all_reduce", "statistic"): (1, BS),
    }
    gathered = head_traffic(shape(), btp(loss_parallel=False), BS)
    assert by_op(gathered, "forward") == {("all_gather", "activation"): (2, BSD + BS * 128)}
    vanilla = head_traffic(shape(), TPSettings("vanilla"), BS)
    assert count(vanilla, "forward") == (0, 0) and count(vanilla, "backward") == (1, BSD)


def test_embedding_and_loss() -> None:
    assert embedding_traffic(shape(), btp(), BS) == []
    assert count(embedding_traffic(shape(), TPSettings("vanilla"), BS), "forward") == (1, BSD)
    assert count(loss_traffic(shape(), btp(), BS, 4), "forward") == (2, 4 * BS + 1)
    calls, elements = count(loss_traffic(shape(), btp(), 5000, 4), "forward")
    assert (calls, elements) == (-(-5000 // 625) + 1, 4 * 5000 + 1)
    assert loss_traffic(shape(), btp(loss_parallel=False), BS, 4) == []


def test_model_is_its_parts() -> None:
    assert model_traffic(shape(), btp(), 1, BS) == []
    rows = model_traffic(shape(), btp(), 4, BS)
    assert {row.scope for row in rows} == {"block 0", "block 1", "block 2", "head"}
    one = count(block_traffic(shape(), btp(), BS), "backward")
    assert count([r for r in rows if r.scope == "block 2"], "backward") == one


@pytest.mark.parametrize(
    ("plan", "gib"), [("megatron", 0.250), ("vanilla_replicated", 1.297), ("btp", 0.219)]
)
def test_published_volumes_of_7b(plan: str, gib: float) -> None:
    """BOOST, Figure 8 (left): 7B, b = 4, s = 4096, bf16, GiB per block and forward pass."""
    family = "full" if plan == "megatron" else "cola"
    traffic = block_traffic(FLAVORS[family]["7B"], TPSettings(plan), 4 * 4096)
    elements = sum(r.elements for r in traffic if r.pass_ == "forward" and r.role == "activation")
    assert round(elements * 2 / 2**30, 3) == gib


def test_vanilla_in_both_passes_is_not_twice_its_forward() -> None:
    """BOOST's factor of two (Table 6) holds for BTP only."""
    for settings, factor in ((btp(norm_stat="column"), 2), (TPSettings("vanilla_replicated"), 1.5)):
        traffic = block_traffic(shape(), settings, BS, column_multiple=1)
        forward, backward = (count(traffic, p)[1] for p in ("forward", "backward"))
        twice = forward + backward == pytest.approx(2 * forward, rel=0.03)
        assert twice == (factor == 2)


def sum_of_linears(model: LlamaArgs) -> int:
    found = count_parameters(model)
    return found.attention + found.feed_forward


def test_data_parallel_volume() -> None:
    """BOOST, Table 6: l(11dr + 3·d_ff·r), and l(4d² + 3d·d_ff) at full rank."""
    assert sum_of_linears(shape()) == 3 * (11 * D * R + 3 * F * R)
    assert sum_of_linears(shape("full")) == 3 * (4 * D * D + 3 * D * F)


def test_fsdp_and_hsdp() -> None:
    args = shape()
    block = 11 * D * R + 3 * F * R + 2 * D
    embedding, head, norm = 128 * D, 128 * D, D
    everything = embedding + 3 * block + head + norm
    rows = data_parallel_traffic(args, btp(), 1, DataParallel(replicate=1, shard=4))
    assert {r.mesh_dim for r in rows} == {"fsdp"}
    assert count(rows, "forward") == (6, everything)
    # Weights again, but for the head's; and gradients.
    assert count(rows, "backward") == (5 + 6, 2 * everything - head)
    always = DataParallel(1, 4, reshard_last=True)
    again = data_parallel_traffic(args, btp(), 1, always)
    assert count(again, "backward") == (12, 2 * everything)
    hsdp = data_parallel_traffic(args, btp(), 1, DataParallel(2, 4, microbatches=3))
    sums = [r for r in hsdp if r.mesh_dim == "dp_replicate"]
    assert count(sums, "backward") == (6, everything // 4)
    assert count(hsdp, "forward") == (18, 3 * everything)
    replicated = data_parallel_traffic(args, btp(), 1, DataParallel(4, 1, microbatches=3))
    assert count(replicated, "backward") == (6, everything)
    assert count(replicated, "forward") == (0, 0)


@pytest.mark.parametrize("plan", ["btp", "vanilla"])
def test_tensor_parallelism_divides_the_weights(plan: str) -> None:
    layout = DataParallel(1, 2)
    whole = data_parallel_traffic(shape(), TPSettings(plan), 1, layout)
    part = data_parallel_traffic(shape(), TPSettings(plan, head="scatter"), 2, layout)
    linears = 11 * D * R + 3 * F * R
    norms = {"btp": D, "vanilla": 2 * D}[plan]
    sizes = {r.scope: r.elements for r in part if r.pass_ == "forward"}
    assert sizes["block 1"] == linears // 2 + norms
    assert count(part, "forward")[0] == count(whole, "forward")[0]


def test_padding() -> None:
    assert padded([(5, 3), (1,), (8,)], 4) == 8 * 3 + 4 + 8


def test_gates_are_padded_too() -> None:
    lax = shape("lax", lax_gate="scalar")
    cola = shape("cola")
    layout = DataParallel(1, 4)
    sizes = [
        {r.scope: r.elements for r in data_parallel_traffic(a, btp(), 1, layout)}
        for a in (lax, cola)
    ]
    assert sizes[0]["block 0"] == sizes[1]["block 0"]
    assert sizes[0]["block 1"] == sizes[1]["block 1"] + 7 * 4


def test_wrong_widths_are_noticed() -> None:
    traffic = block_traffic(replace(shape(), rank_ffn=24), btp(), BS)
    assert count(traffic, "backward")[1] == BS * (4 * R + 3 * 24) != 7 * BSR
