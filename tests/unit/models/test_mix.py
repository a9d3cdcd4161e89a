# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch

from torchtitan_lr.models.linears import LowRankLinear, Mix


@pytest.fixture(autouse=True)
def _seeded_fp64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_mix_adds_the_carried_latents():
    plain, gated = LowRankLinear(8, 8, 4), LowRankLinear(8, 8, 4, gated=True)
    gated.gate.data.fill_(-0.5)
    h, c = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    mixed = Mix()(list(h), list(c), [plain, gated])
    torch.testing.assert_close(mixed[0], h[0] + c[0])
    torch.testing.assert_close(mixed[1], h[1] - 0.5 * c[1])
    unmixed = Mix()(list(h), None, [plain, gated])
    assert torch.equal(torch.stack(unmixed), h)
