# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import torch
from torchtitan.components.loss import cross_entropy_loss

from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.titan import IGNORE_INDEX


def test_is_the_sum_of_negative_log_likelihoods_over_valid_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 2] = IGNORE_INDEX
    log_p = logits.log_softmax(-1)
    want = -sum(log_p[b, s, labels[b, s]] for b in range(2) for s in range(5) if labels[b, s] >= 0)
    torch.testing.assert_close(cross_entropy_sum(logits, labels), want, rtol=1e-15, atol=0)


def test_fp64_is_kept_where_upstream_rounds() -> None:
    logits = torch.randn(1, 4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.arange(4)[None]
    assert cross_entropy_sum(logits, labels).dtype == torch.float64
    assert cross_entropy_loss(logits, labels).dtype == torch.float32


def test_bf16_logits_are_raised_to_fp32() -> None:
    logits = torch.randn(1, 4, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    labels = torch.arange(4)[None]
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    assert loss == cross_entropy_sum(logits.float(), labels)
