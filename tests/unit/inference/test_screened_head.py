# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The screened head draws the tokens of the whole one."""

import pytest
import torch
from torch import nn

from tests.unit.inference.test_decode import GREEDY, build, decode, prompts_of
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.decode import Decoder
from torchtitan_lr.inference.sampling import Sampling
from torchtitan_lr.inference.screened_head import ScreenedHead, screen_head


def heads(rows=5, vocabulary=3000, width=64, outlier=1.0):
    generator = torch.Generator().manual_seed(0)
    output = nn.Linear(width, vocabulary, bias=False)
    weight = torch.randn(vocabulary, width, generator=generator)
    weight[:, 3] *= outlier  # the codes of all other columns then have few levels
    with torch.no_grad():
        output.weight.copy_(weight)
    x = torch.randn(rows, 1, width, generator=generator)
    x[..., 5] *= outlier
    return output, x


@pytest.mark.parametrize("outlier", [1.0, 8.0])
def test_bounds_hold_and_are_of_use(outlier):
    output, x = heads(outlier=outlier)
    lower, upper = ScreenedHead(output.weight).bounds(x[:, 0])
    exact = output(x)[:, 0]
    assert (lower <= exact).all() and (exact <= upper).all()
    assert (upper - lower).max() < exact.std() * (2 if outlier == 1 else 8)


@pytest.mark.parametrize("kept", [1, 7])
@pytest.mark.parametrize("outlier", [1.0, 8.0])
def test_the_most_likely_tokens_are_exact(kept, outlier):
    output, x = heads(outlier=outlier)
    exact = output(x)[:, 0].topk(kept)
    found = ScreenedHead(output.weight, kept)(x, None, output)[:, 0]
    assert torch.equal(found.topk(kept).indices, exact.indices)
    torch.testing.assert_close(found.topk(kept).values, exact.values)
    if outlier == 1:
        assert found.isfinite().sum() < found.numel() / 20  # few logits were computed


def test_bounds_that_are_too_narrow_would_be_noticed():
    output, x = heads(rows=200)
    head = ScreenedHead(output.weight)
    head.weight_error.zero_()
    head.code_norm.zero_()
    lower, upper = head.bounds(x[:, 0])
    exact = output(x)[:, 0]
    assert ((exact < lower) | (upper < exact)).any()
    wrong = head(x, None, output)[:, 0].argmax(-1) != exact.argmax(-1)
    assert wrong.any()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=5, top_p=0.9)])
def test_tokens_are_those_of_the_whole_head(sampling):
    model = build("cola_gqa")
    prompts = prompts_of(model)
    expected = decode(Decoder(model, prompts, [10] * 3, sampling, [1, 2, 3]))
    screen_head(model, sampling.top_k or 1)
    assert decode(Decoder(model, prompts, [10] * 3, sampling, [1, 2, 3])) == expected


def test_a_head_of_lanes_is_refused():
    with pytest.raises(ConfigError, match="--screen_head: got 'LaneHeadEdge'"):
        screen_head(build("full_lanes"))
