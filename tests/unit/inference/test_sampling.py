# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch

from torchtitan_lr.inference.decode import Sampling, draws

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])
ROWS = 20_000


def frequencies(sampling):
    chosen = sampling.choose(LOGITS.repeat(ROWS, 1), draws(0, ROWS))
    return chosen.bincount(minlength=5) / ROWS


def expected(kept, temperature=1.0):
    return (LOGITS[0] / temperature + torch.tensor(kept).log()).softmax(-1)


@pytest.mark.parametrize(
    ("sampling", "kept", "temperature"),
    [
        (Sampling(), [1, 1, 1, 1, 1], 1.0),
        (Sampling(2.0), [1, 1, 1, 1, 1], 2.0),
        (Sampling(1.0, top_k=2), [0, 1, 0, 1, 0], 1.0),
        (Sampling(1.0, top_k=99), [1, 1, 1, 1, 1], 1.0),
        # Probabilities in order: .636 .234 .086 .032 .012
        (Sampling(1.0, top_p=0.6), [0, 1, 0, 0, 0], 1.0),
        (Sampling(1.0, top_p=0.7), [0, 1, 0, 1, 0], 1.0),
        (Sampling(1.0, top_p=0.9), [0, 1, 1, 1, 0], 1.0),
        (Sampling(4.0, top_p=0.6), [0, 1, 1, 1, 0], 4.0),
        (Sampling(1.0, top_k=3, top_p=0.9), [0, 1, 0, 1, 0], 1.0),  # of three: .665 .245 .090
        (Sampling(1e-300), [0, 1, 0, 0, 0], 1.0),
        (Sampling(0), [0, 1, 0, 0, 0], 1.0),
    ],
)
def test_frequencies(sampling, kept, temperature):
    found = frequencies(sampling)
    torch.testing.assert_close(found, expected(kept, temperature), atol=0.015, rtol=0)
    assert (found[torch.tensor(kept) == 0] == 0).all()


def test_the_largest_draw_takes_the_last_token():
    """1 - 2**-53 times the sum may round to the sum itself."""
    almost = torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64)
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    assert Sampling().choose(logits, almost).tolist() == [999, 0]
    least = Sampling(top_k=10).choose(logits, almost)
    assert least.tolist() == logits[0].topk(10).indices[[9, 0]].tolist()


def test_draws_follow_the_seed_and_no_length():
    assert torch.equal(draws(3, 4), draws(3, 9)[:4])
    assert not torch.equal(draws(3, 4), draws(4, 4))
