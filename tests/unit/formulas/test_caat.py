# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net: what lanes add up and in which precision, and the speed-up model of appendix C."""

import pytest
import torch

from tests.unit.tiny import tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.formulas.communication import block_traffic
from torchtitan_lr.formulas.papers.caat import (
    block_payload,
    block_time,
    gpt_block_operations,
    hiding_fraction,
    llama_block_operations,
    speed_up,
)
from torchtitan_lr.formulas.traffic import count
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.lane_edges import share_channels
from torchtitan_lr.parallel.tensor.plans import TPSettings

D, S, T, R = 4096, 2048, 8, 20000.0
OPERATIONS, PAYLOAD = gpt_block_operations(D, S), block_payload(D, S, 1.0)


def test_shared_channels_are_cut_not_rounded() -> None:
    """0.35 of 48 is 16.8: the seventeenth channel is private."""
    args = tiny_args("full", lanes=4, sync_fraction=0.35)
    assert args.shared_channels(48) == 16
    assert args.shared_channels(80) == 28


@pytest.mark.parametrize("wide", [True, False])
def test_forward_adds_lanes_up_in_fp32(wide: bool) -> None:
    """256 + 1 + 1 + 1 + 3 is 262; bf16, whose unit is 2 there, forgets every 1 on its way."""
    terms = (
        torch.tensor([256.0, 1, 1, 1, 3], dtype=torch.bfloat16).view(1, 1, 5, 1).expand(1, 2, 5, 4)
    )
    out = share_channels(terms, 3, wide)  # `wide` is backward's
    assert (out[..., :3] == 262).all()
    assert torch.equal(out[..., 3:], terms[..., 3:])


@pytest.mark.parametrize(("wide", "expected"), [(True, 262), (False, 260)])
def test_backward_adds_lanes_up_as_it_is_told(wide: bool, expected: int) -> None:
    x = torch.zeros(1, 2, 5, 4, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.tensor([256.0, 1, 1, 1, 3], dtype=torch.bfloat16).view(1, 1, 5, 1)
    share_channels(x, 3, wide).backward(gradient.expand_as(x))
    assert x.grad is not None
    assert (x.grad[..., :3] == expected).all()
    assert torch.equal(x.grad[..., 3:], gradient.expand_as(x)[..., 3:])


def test_operations_are_the_products_of_a_gpt_block() -> None:
    linears = 3 * D * D + D * D + 2 * D * 4 * D  # q, k, v; o; the feed-forward
    scores = 2 * S * S * D  # QKᵀ and its product with V
    assert 2 * (S * linears + scores) == OPERATIONS


def test_our_block_has_three_matrices_in_its_feed_forward() -> None:
    shape = FLAVORS["full"]["7B"]
    linears = 4 * D * D + 3 * D * shape.ffn_dim
    assert llama_block_operations(shape, S) == 2 * (S * linears + 2 * S * S * D)


# With d = 4096, s = 2048 and R = 20,000, in units of 2·d·s/T operations: products take 12d + 2s =
# 53,248 and a whole payload takes RT. Worked out by hand from these numbers.
@pytest.mark.parametrize(
    ("fraction", "degree", "expected"),
    [
        (0.0, 8, 213_248 / 53_248),
        (0.25, 8, 213_248 / 93_248),
        (0.5, 8, 213_248 / 133_248),
        (1.0, 8, 1.0),
        (0.5, 2, 93_248 / 73_248),
        (0.5, 16, 373_248 / 213_248),
    ],
)
def test_speed_up(fraction: float, degree: int, expected: float) -> None:
    assert speed_up(OPERATIONS, PAYLOAD, fraction, degree, R) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("fraction", "degree", "ratio", "expected"),
    [
        (0.5, 8, R, 2.0),  # 160,000 against 80,000: both above the products
        (0.25, 8, R, 160_000 / 53_248),  # 40,000 hide behind the products
        (0.0, 8, R, 160_000 / 53_248),
        (0.5, 2, R, 1.0),  # all of 40,000 hides
        (0.5, 2, 1.0, 1.0),
    ],
)
def test_speed_up_where_reductions_overlap(
    fraction: float, degree: int, ratio: float, expected: float
) -> None:
    found = speed_up(OPERATIONS, PAYLOAD, fraction, degree, ratio, overlapped=True)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("degree", "expected"), [(8, 53_248 / 160_000), (16, 0.1664), (2, 1.0)])
def test_communication_hides_up_to_a_fraction(degree: int, expected: float) -> None:
    assert hiding_fraction(OPERATIONS, PAYLOAD, degree, R) == pytest.approx(expected, rel=1e-12)


def test_times_of_a_block() -> None:
    """In operations of one rank: 100 / 4 of products, and 6 elements of 3 operations each."""
    assert block_time(100, 6, 4, 3.0) == 43.0
    assert block_time(100, 6, 4, 3.0, overlapped=True) == 25.0
    assert block_time(100, 6, 20, 3.0, overlapped=True) == 18.0


def test_a_payload_has_whole_channels() -> None:
    """2.8 of ten channels are two: for 3 tokens, in each of two reductions."""
    assert block_payload(10, 3, 0.28) == 12


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
