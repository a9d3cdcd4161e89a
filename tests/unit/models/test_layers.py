# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.tiny import tiny_args
from torchtitan_lr.models.families.lax import MixEdge
from torchtitan_lr.models.layers import (
    DenseEdge,
    DownEdge,
    LowRankLinear,
    OutputProjection,
    TokenEmbedding,
    UpEdge,
    activate,
    low_rank_group,
)


@pytest.fixture(autouse=True)
def _seeded_fp64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_factors_have_the_papers_shapes_and_no_bias():
    linear = LowRankLinear(48, 80, 12)
    assert {k: tuple(v.shape) for k, v in linear.named_parameters()} == {
        "A.weight": (12, 48),
        "B.weight": (80, 12),
    }


def test_a_gate_has_one_dimension():
    assert LowRankLinear(48, 80, 12, gated=True).gate.shape == (1,)


@pytest.mark.parametrize(
    ("family", "gate", "first_block", "gated"),
    [
        ("lax", "scalar", False, True),
        ("lax", "scalar", True, False),
        ("lax", "identity", False, False),
        ("cola", "identity", False, False),
    ],
)
def test_who_has_a_gate(family, gate, first_block, gated):
    args = tiny_args(family, lax_gate=gate)
    linear = args.model_family.build_linear(args, 48, 80, 12, first_block)
    assert isinstance(linear, LowRankLinear)
    assert (linear.gate is not None) == gated


def test_full_rank_is_a_plain_linear():
    args = tiny_args("full")
    linear = args.model_family.build_linear(args, 48, 80, 0, False)
    assert type(linear) is nn.Linear
    assert linear.bias is None


def test_down_then_up_is_the_low_rank_product():
    linears = [LowRankLinear(48, n, 12) for n in (48, 24, 24)]
    norm, x = nn.RMSNorm(48, eps=1e-6), torch.randn(2, 5, 48)
    nn.init.normal_(norm.weight)
    outputs = UpEdge()(DownEdge()(x, linears, norm), linears)
    normed = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    for linear, out in zip(linears, outputs, strict=True):
        torch.testing.assert_close(out, normed @ (linear.B.weight @ linear.A.weight).T)
        # Without the norm it is another product.
        assert not torch.allclose(out, x @ (linear.B.weight @ linear.A.weight).T)


def test_dense_edge_applies_norm_and_weights():
    linears = [nn.Linear(48, 80, bias=False), nn.Linear(48, 24, bias=False)]
    x = torch.randn(2, 5, 48)
    for linear, out in zip(linears, DenseEdge()(x, linears), strict=True):
        torch.testing.assert_close(out, x @ linear.weight.T)
    double = DenseEdge()(x, linears, lambda y: 2 * y)
    torch.testing.assert_close(double[0], 2 * x @ linears[0].weight.T)


def test_up_edge_refuses_a_missing_latent():
    linears = [LowRankLinear(48, 48, 12), LowRankLinear(48, 48, 12)]
    with pytest.raises(ValueError, match="zip"):
        UpEdge()([torch.randn(1, 1, 12)], linears)


def test_mix_adds_the_carried_latents():
    plain, gated = LowRankLinear(8, 8, 4), LowRankLinear(8, 8, 4, gated=True)
    gated.gate.data.fill_(-0.5)
    h, c = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    mixed = MixEdge()(list(h), list(c), [plain, gated])
    torch.testing.assert_close(mixed[0], h[0] + c[0])
    torch.testing.assert_close(mixed[1], h[1] - 0.5 * c[1])
    unmixed = MixEdge()(list(h), None, [plain, gated])
    assert torch.equal(torch.stack(unmixed), h)


def test_activation_by_projection():
    h = torch.randn(2, 3, 4)
    first, second = activate(list(h), [True, False])
    assert torch.equal(first, F.silu(h[0]))
    assert torch.equal(second, h[1])


@pytest.mark.parametrize("silu", [False, True])
def test_a_group_is_b_sigma_a(silu):
    linear, norm, x = LowRankLinear(8, 6, 4), nn.RMSNorm(8), torch.randn(2, 3, 8)
    edges = DownEdge(), UpEdge()
    (out,), (latent,) = low_rank_group(x, [linear], *edges, [silu], norm)
    torch.testing.assert_close(latent, norm(x) @ linear.A.weight.T)
    expected = (F.silu(latent) if silu else latent) @ linear.B.weight.T
    torch.testing.assert_close(out, expected)


def test_ends_of_the_model():
    embedding, output, norm = TokenEmbedding(16, 8), OutputProjection(8, 16), nn.RMSNorm(8)
    tokens = torch.tensor([[3, 1]])
    x = embedding(tokens)
    assert torch.equal(x[0, 0], embedding.weight[3])
    torch.testing.assert_close(output(x, norm), norm(x) @ output.weight.T)
    torch.testing.assert_close(output(x), x @ output.weight.T)
