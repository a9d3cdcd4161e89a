# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model of every family, and with lanes, against the formulas written out; fp64."""

import itertools

import pytest
import torch

from tests.support.nightly import nightly
from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.models.lanes import share_channels
from torchtitan_lr.models.llama import build_freqs_cis

PLACEMENTS = ("both", "lowrank", "reduced", "fullrank", "none")
CASES = [("full", "fullrank"), ("svd", "fullrank"), ("svd", "none")]
CASES += list(itertools.product(("cola", "lax"), PLACEMENTS))


def rms_norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Reference:
    """The model written from the formulas, by parameter name, or one of its lanes."""

    def __init__(self, model, placement="fullrank", lane=0):
        self.args = model.model_args
        self.w = {}
        for name, weight in model.named_parameters():
            if self.args.lanes > 1 and weight.ndim == 2 and "embeddings" not in name:
                dim = int(name.endswith(("wo.weight", "w2.weight")))
                weight = weight.chunk(self.args.lanes, dim)[lane]
            self.w[name] = weight
        self.placement = placement
        self.latents = {}

    def linear(self, name, kind, x, carried):
        if f"{name}.weight" in self.w:
            return x @ self.w[f"{name}.weight"].T
        latent = x @ self.w[f"{name}.A.weight"].T
        self.latents[kind] = latent
        if self.args.family == "lax" and carried:
            latent = latent + self.w.get(f"{name}.gate", 1.0) * carried[kind]
        inner = {"both": True, "lowrank": True, "reduced": kind == "gate"}
        if inner.get(self.placement, False):
            latent = latent * torch.sigmoid(latent)
        return latent @ self.w[f"{name}.B.weight"].T

    def rope(self, x):
        table = build_freqs_cis(self.args.head_dim, 64, self.args.rope_theta, None, torch.float64)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * table[: x.shape[1], None]).flatten(-2)

    def attention(self, p, x, carried):
        a = self.args
        x = rms_norm(x, self.w[f"{p}attention_norm.weight"])
        q, k, v = (
            self.linear(f"{p}attention.w{c}", c, x, carried).unflatten(-1, (-1, a.head_dim))
            for c in "qkv"
        )
        q, k = self.rope(q), self.rope(k)
        heads = []
        for h in range(a.n_heads // a.lanes):
            g = h // (a.n_heads // a.kv_heads)
            scores = q[:, :, h] @ k[:, :, g].transpose(1, 2) / a.head_dim**0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, g])
        return self.linear(f"{p}attention.wo", "o", torch.cat(heads, -1), carried)

    def feed_forward(self, p, x, carried):
        x = rms_norm(x, self.w[f"{p}ffn_norm.weight"])
        gate = self.linear(f"{p}feed_forward.w1", "gate", x, carried)
        up = self.linear(f"{p}feed_forward.w3", "up", x, carried)
        if self.placement in ("both", "fullrank"):
            gate = gate * torch.sigmoid(gate)
        return self.linear(f"{p}feed_forward.w2", "down", gate * up, carried)

    def __call__(self, ids):
        x, carried = self.w["tok_embeddings.weight"][ids], {}
        for i in range(self.args.n_layers):
            self.latents = {}
            x = x + self.attention(f"layers.{i}.", x, carried)
            x = x + self.feed_forward(f"layers.{i}.", x, carried)
            carried = self.latents
        return self.logits(x)

    def logits(self, x):
        return rms_norm(x, self.w["norm.weight"]) @ self.w["output.weight"].T


def partial_sum(terms, shared):
    """CAAT-Net, equations 8 and 12: y_i = [Σ_j a_j[:s], a_i[s:]]."""
    total = torch.stack([a[..., :shared] for a in terms]).sum(0)
    return [torch.cat((total, a[..., shared:]), -1) for a in terms]


def lane_by_lane(model, ids):
    """Logits with a list of streams, one lane after the other."""
    args = model.model_args
    shared = args.shared_channels(args.dim)
    lanes = [Reference(model, lane=i) for i in range(args.lanes)]
    x = [model.tok_embeddings.weight[ids]] * args.lanes
    for i in range(args.n_layers):
        for layer in (Reference.attention, Reference.feed_forward):
            terms = [
                layer(lane, f"layers.{i}.", own, {}) for lane, own in zip(lanes, x, strict=True)
            ]
            x = [a + b for a, b in zip(x, partial_sum(terms, shared), strict=True)]
    return torch.cat([lane.logits(own) for lane, own in zip(lanes, x, strict=True)], -1)


def gradients(model, logits):
    model.zero_grad()
    logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def largest(a, b):
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max()).item() for n in a)


@pytest.mark.parametrize(("lanes", "fraction"), [(2, 0.3), (4, 0.0), (4, 0.3), (4, 1.0)])
def test_lanes_equal_the_definition(lanes, fraction):
    model = build_tiny("full", torch.float64, lanes=lanes, sync_fraction=fraction)
    ids = tokens(model.model_args)
    exact = lane_by_lane(model, ids)
    torch.testing.assert_close(model(ids), exact, rtol=1e-12, atol=1e-12)
    assert largest(gradients(model, model(ids)), gradients(model, exact)) < 1e-12


def randomized(family, **changes):
    """Norms, gates and everything else away from their initial values."""
    model = build_tiny(family, torch.float64, **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * noise)
    return model


@pytest.mark.parametrize("n_kv_heads", [None, 2])
@pytest.mark.parametrize(("family", "placement"), CASES)
def test_model_is_the_formula(family, placement, n_kv_heads):
    model = randomized(family, activation=placement, n_kv_heads=n_kv_heads)
    ids = tokens(model.model_args)
    torch.testing.assert_close(model(ids), Reference(model, placement)(ids), rtol=1e-11, atol=1e-11)


def test_learned_gates_are_in_the_formula():
    model = randomized("lax", lax_gate="scalar")
    ids = tokens(model.model_args)
    torch.testing.assert_close(model(ids), Reference(model, "both")(ids), rtol=1e-11, atol=1e-11)
    model(ids).square().mean().backward()
    gates = {k: p.grad for k, p in model.named_parameters() if k.endswith(".gate")}
    assert len(gates) == 7 * 2
    assert not any(name.startswith("layers.0.") for name in gates)
    assert all(grad is not None and grad.abs() > 0 for grad in gates.values())


@pytest.mark.parametrize(
    ("family", "backend"), [("full", "aot_eager"), ("lax", "eager"), *nightly(("lax", "aot_eager"))]
)
def test_blocks_compile_without_a_graph_break(family, backend):
    torch._dynamo.reset()
    gate = {"lax_gate": "scalar"} if family == "lax" else {}
    model = build_tiny(family, torch.float64, n_kv_heads=2, **gate)
    ids = tokens(model.model_args)
    expected = model(ids)
    torch._dynamo.utils.counters.clear()
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=backend)
    # The compiler may replace an operator by others, which round fp64 otherwise.
    torch.testing.assert_close(model(ids), expected, rtol=1e-12, atol=1e-12)
    # One graph serves all blocks; LaX's first block, which receives nothing, is another.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (2 if family == "lax" else 1)


def test_lanes_are_added_up_in_the_precision_that_is_asked_for():
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
