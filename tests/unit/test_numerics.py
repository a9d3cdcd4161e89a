# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norms and products of low precision against fp64, and the memory that they take."""

import pytest
import torch
from torch.nn.utils import get_total_norm

from tests.support.allocations import Noted, peak_bytes
from torchtitan_lr.compat.fake import FakeTensorMode
from torchtitan_lr.numerics import exact_products, joint_norm, product, rounded_once, scale_, sides

BF16_ROUNDS = torch.tensor(1 / 393_728)
"""One over a number of tokens; bf16 is off by 0.24%."""


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_a_norm_is_that_of_fp64_without_a_copy(strided, dtype):
    x = numbers(1000, 700, dtype=dtype)
    x = x.mT if strided else x
    others = [numbers(3), torch.zeros(0, 4), torch.tensor(2.0)]
    exact = sum(t.double().square().sum() for t in (x, *others)).sqrt()
    assert joint_norm([x, *others]).item() == pytest.approx(exact.item(), rel=1e-14)
    assert peak_bytes(lambda: joint_norm([x])) < x.nbytes / 2
    # The control: torch's own copies within the kernel.
    copied = peak_bytes(lambda: torch.linalg.vector_norm(x, dtype=torch.float64))
    assert copied >= 8 * x.numel()


def test_a_norm_of_bf16_is_not_rounded_to_bf16():
    parts = [numbers(301, 40, dtype=torch.bfloat16), numbers(77, dtype=torch.bfloat16)]
    exact = joint_norm([part.double() for part in parts])
    found = joint_norm(parts, fp64=False)  # as on a GPU
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=1e-5)
    # The control: torch's own.
    assert abs(get_total_norm(parts).item() / exact.item() - 1) > 1e-4


def test_a_product_is_rounded_once():
    tensors = [numbers(50, 3, dtype=torch.bfloat16), numbers(9), torch.tensor(3.0).bfloat16()]
    expected = [(t.float() * BF16_ROUNDS).to(t.dtype) for t in tensors]
    scale_(tensors, BF16_ROUNDS.double())
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    x = numbers(1000, 100, dtype=torch.bfloat16)
    assert peak_bytes(lambda: scale_([x], BF16_ROUNDS)) < x.nbytes / 10


def test_an_update_of_two_operators_is_rounded_once():
    narrow, wide = numbers(50, 3, dtype=torch.bfloat16), numbers(9)
    expected = [(w.float() * 0.99).add(1e-2) for w in (narrow, wide)]
    twice = narrow.clone().mul_(0.99).add_(1e-2)  # the control
    with rounded_once([narrow, wide]) as exact:
        assert exact[1] is wide
        for weight in exact:
            weight.mul_(0.99).add_(1e-2)
    assert narrow.equal(expected[0].bfloat16()) and wide.equal(expected[1])
    assert not twice.equal(narrow)


def test_a_gpu_multiplies_bf16_in_fp32():
    """Its kernel would round a factor without dimensions."""
    factors = []

    def note(func, args, _):
        if "mul" in str(func):
            factors.append((args[1].dtype, args[1].ndim))

    with FakeTensorMode(), Noted(note):
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        scale_([torch.zeros(shape, **like) for shape in ((2, 3), (4,))], torch.tensor(1.5))
    assert factors == [(torch.float32, 2), (torch.float32, 1)]


def test_a_gpu_multiplies_split_matrices_by_one_product_with_fp32_sums():
    seen = []

    def note(func, args, _):
        if "mm" in func.__name__:
            seen.append((func.__name__, *(x.dtype for x in args[:2]), tuple(args[0].shape)))

    with Noted(note), exact_products(split=True):
        for stack in ((), (3,)):
            left, right = sides(torch.empty(*stack, 8, 16, device="meta"))
            assert product(left, right).dtype == torch.float32
    bf16 = torch.bfloat16
    assert seen == [("mm.dtype", bf16, bf16, (8, 48)), ("bmm.dtype", bf16, bf16, (3, 8, 48))]
