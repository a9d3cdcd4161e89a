# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The speed-up model of CAAT-Net's appendix C."""

import pytest

from tests.unit.tiny import tiny_args
from torchtitan_lr.analysis.caat import (
    block_payload,
    block_time,
    gpt_block_operations,
    hiding_fraction,
    llama_block_operations,
    speed_up,
)
from torchtitan_lr.analysis.communication import block_traffic
from torchtitan_lr.analysis.traffic import count
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plans import TPSettings

D, S, T, R = 4096, 2048, 8, 20000.0
OPERATIONS, PAYLOAD = gpt_block_operations(D, S), block_payload(D, S, 1.0)


def test_operations_are_the_products_of_a_gpt_block() -> None:
    linears = 3 * D * D + D * D + 2 * D * 4 * D  # q, k, v; o; the feed-forward
    scores = 2 * S * S * D  # QKᵀ and its product with V
    assert 2 * (S * linears + scores) == OPERATIONS


def test_our_block_has_three_matrices_in_its_feed_forward() -> None:
    shape = FLAVORS["full"]["7B"]
    linears = 4 * D * D + 3 * D * shape.ffn_dim
    assert llama_block_operations(shape, S) == 2 * (S * linears + 2 * S * S * D)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_speed_up_is_the_published_expression(fraction: float) -> None:
    expected = (12 * D + 2 * S + R * T) / (12 * D + 2 * S + fraction * R * T)
    assert speed_up(OPERATIONS, PAYLOAD, fraction, T, R) == pytest.approx(expected)


def test_speed_up_grows_with_ranks_and_falls_with_width() -> None:
    by_degree = [speed_up(OPERATIONS, PAYLOAD, 0.5, t, R) for t in (2, 4, 8, 16)]
    assert by_degree == sorted(by_degree) and by_degree[0] > 1
    by_width = [
        speed_up(gpt_block_operations(d, S), block_payload(d, S, 1.0), 0.5, T, R)
        for d in (1024, 4096, 16384)
    ]
    assert by_width == sorted(by_width, reverse=True)


def test_communication_hides_up_to_a_fraction() -> None:
    p = hiding_fraction(OPERATIONS, PAYLOAD, T, R)
    assert p == pytest.approx((12 * D + 2 * S) / (R * T)) and 0 < p < 1
    at = [block_time(OPERATIONS, f * PAYLOAD, T, R, overlapped=True) for f in (0.0, p, 1.01 * p)]
    assert at[0] == pytest.approx(at[1]) and at[2] > 1.005 * at[1]
    assert speed_up(OPERATIONS, PAYLOAD, p, T, R, overlapped=True) == pytest.approx(1 / p)


def test_a_fast_link_hides_everything() -> None:
    assert hiding_fraction(OPERATIONS, PAYLOAD, 2, 1.0) == 1.0
    assert speed_up(OPERATIONS, PAYLOAD, 0.5, 2, 1.0, overlapped=True) == 1.0


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_payload_is_that_of_the_plan(fraction: float) -> None:
    args = tiny_args("full", lanes=4, sync_fraction=fraction)
    sent = count(block_traffic(args, TPSettings("caat"), tokens=10), "forward")[1]
    assert sent == block_payload(args.dim, 10, fraction)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [((0.5, 0, R), "tp_degree"), ((0.5, 2, 0.0), "ratio"), ((1.5, 2, R), "fraction")],
)
def test_impossible_numbers_are_refused(arguments: tuple[float, int, float], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: got "):
        speed_up(OPERATIONS, PAYLOAD, *arguments)
