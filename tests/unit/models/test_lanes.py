# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The lanes model on one device, against its definition written out lane by lane."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.models.lanes import share_channels
from torchtitan_lr.models.llama import LlamaModel, apply_rope

WIDE = torch.float64


def build(family: str = "full", **changes: Any) -> LlamaModel:
    return build_tiny(family, WIDE, **{"lanes": 4, "sync_fraction": 0.3, **changes})


def partial_sum(terms: list[Tensor], shared: int) -> list[Tensor]:
    """Equations 8 and 12: y_i = [Σ_j a_j[:s], a_i[s:]]."""
    total = torch.stack([a[..., :shared] for a in terms]).sum(0)
    return [torch.cat((total, a[..., shared:]), -1) for a in terms]


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int) -> Tensor:
    """Causal attention of heads side by side, the scores written out."""
    q, k, v = (t.unflatten(-1, (-1, width)) for t in (q, k, v))
    q, k, v = (t.transpose(1, 2) for t in (apply_rope(q, table), apply_rope(k, table), v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / width**0.5).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def written_out(model: LlamaModel, ids: Tensor) -> Tensor:
    """Logits with a list of streams, one lane after the other."""
    args: Any = model.model_args
    shared = args.shared_channels(args.dim)
    lanes = range(args.lanes)
    rows = lambda w, i: w.weight.chunk(args.lanes, 0)[i]  # noqa: E731
    columns = lambda w, i: w.weight.chunk(args.lanes, 1)[i]  # noqa: E731
    x = [F.embedding(ids, model.tok_embeddings.weight) for _ in lanes]  # type: ignore[union-attr]
    for block in model.layers.values():
        attention: Any = block.attention
        terms = []
        for i in lanes:
            h = block.attention_norm(x[i])
            qkv = (F.linear(h, rows(w, i)) for w in (attention.wq, attention.wk, attention.wv))
            heads = attend(*qkv, model.freqs_cis, args.head_dim)
            terms.append(F.linear(heads, columns(attention.wo, i)))
        x = [a + b for a, b in zip(x, partial_sum(terms, shared), strict=True)]
        mlp: Any = block.feed_forward
        terms = []
        for i in lanes:
            h = block.ffn_norm(x[i])
            hidden = F.silu(F.linear(h, rows(mlp.w1, i))) * F.linear(h, rows(mlp.w3, i))
            terms.append(F.linear(hidden, columns(mlp.w2, i)))
        x = [a + b for a, b in zip(x, partial_sum(terms, shared), strict=True)]
    return torch.cat([F.linear(model.norm(x[i]), rows(model.output, i)) for i in lanes], -1)  # type: ignore[misc]


def gradients(model: LlamaModel, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max()).item() for n in a)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("lanes", [2, 4])
def test_equals_the_definition(lanes: int, fraction: float) -> None:
    model = build(lanes=lanes, sync_fraction=fraction)
    ids = tokens(model.model_args)
    torch.testing.assert_close(model(ids), written_out(model, ids), rtol=1e-12, atol=1e-12)
    ours = gradients(model, model(ids))
    assert len(ours) == len(list(model.parameters()))
    assert largest(ours, gradients(model, written_out(model, ids))) < 1e-12


def test_sharing_everything_is_the_model_without_lanes() -> None:
    shared, ordinary = build(sync_fraction=1.0), build_tiny("full", WIDE)
    assert shared.state_dict().keys() == ordinary.state_dict().keys()
    shared.load_state_dict(ordinary.state_dict())
    ids = tokens(ordinary.model_args)
    assert largest(gradients(shared, shared(ids)), gradients(ordinary, ordinary(ids))) < 1e-12


def test_lanes_are_added_up_in_the_precision_that_is_asked_for() -> None:
    """256 + 1 + 1 + 1 + 3 is 262; bf16, whose unit is 2 there, forgets every 1 on its way."""
    terms = torch.tensor([256.0, 1, 1, 1, 3], dtype=torch.bfloat16).view(1, 1, 5, 1)
    for wide, backward in ((True, 262), (False, 260)):
        x = terms.repeat(1, 2, 1, 4).requires_grad_()
        out = share_channels(x, 3, wide)
        out.backward(terms.expand_as(x))
        assert x.grad is not None
        assert (out[..., :3] == 262).all() and (x.grad[..., :3] == backward).all()
        assert torch.equal(out[..., 3:], x[..., 3:])
        assert torch.equal(x.grad[..., 3:], x[..., 3:])
