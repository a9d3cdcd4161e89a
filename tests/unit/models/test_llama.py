# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.unit.tiny import FAMILIES, build_tiny, tokens
from torchtitan_lr.models.rope import build_freqs_cis

PLACEMENTS = ("both", "lowrank", "reduced", "fullrank", "none")
CASES = [("full", "fullrank"), ("svd", "fullrank"), ("svd", "none")]
CASES += list(itertools.product(("cola", "lax"), PLACEMENTS))


def rms_norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Reference:
    """The model written from the formulas, by parameter name; fp64."""

    def __init__(self, model, placement):
        self.w = model.state_dict()
        self.args = model.model_args
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
        for h in range(a.n_heads):
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
        return rms_norm(x, self.w["norm.weight"]) @ self.w["output.weight"].T


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


def test_the_formulas_differ():
    """Negative control: no two placements agree, so the test above can tell them apart."""
    for family in ("cola", "lax"):
        model = randomized(family)
        ids = tokens(model.model_args)
        outputs = [Reference(model, placement)(ids) for placement in PLACEMENTS]
        for one, other in itertools.combinations(outputs, 2):
            assert (one - other).abs().max() > 1e-3


def test_learned_gates_are_in_the_formula():
    model = randomized("lax", lax_gate="scalar")
    ids = tokens(model.model_args)
    torch.testing.assert_close(model(ids), Reference(model, "both")(ids), rtol=1e-11, atol=1e-11)
    model(ids).square().mean().backward()
    gates = {k: p.grad for k, p in model.named_parameters() if k.endswith(".gate")}
    assert len(gates) == 7 * 2
    assert not any(name.startswith("layers.0.") for name in gates)
    assert all(grad is not None and grad.abs() > 0 for grad in gates.values())


def test_gates_start_as_the_identity():
    ids = tokens(build_tiny("lax").model_args)
    assert torch.equal(build_tiny("lax")(ids), build_tiny("lax", lax_gate="scalar")(ids))
    assert not torch.equal(build_tiny("lax")(ids), build_tiny("cola")(ids))


def test_lax_carries():
    """Block 1 sees block 0's latents, and its gradient reaches them."""
    model = build_tiny("lax", torch.float64)
    x = torch.randn(1, 8, 48, dtype=torch.float64)
    _, latents = model.layers["0"](x, model.freqs_cis)
    assert [tuple(h.shape) for h in latents] == [(1, 8, 12)] * 4 + [(1, 8, 20)] * 3
    latents = [h.detach().requires_grad_() for h in latents]
    out, _ = model.layers["1"](x, model.freqs_cis, tuple(latents))
    for i in range(7):
        moved = [h + 0.1 if i == j else h for j, h in enumerate(latents)]
        again, _ = model.layers["1"](x, model.freqs_cis, tuple(moved))
        assert (again - out).abs().max() > 1e-6
    gradients = torch.autograd.grad(out.square().sum(), latents)
    assert all(g.abs().max() > 0 for g in gradients)


@pytest.mark.parametrize("family", ["full", "svd", "cola"])
def test_other_families_carry_nothing(family):
    model = build_tiny(family)
    x, latents = model.layers["0"](torch.randn(1, 8, 48), model.freqs_cis)
    assert latents is None
    assert x.shape == (1, 8, 48)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_causal(family):
    model = build_tiny(family)
    ids = tokens(model.model_args)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 96
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_is_kept(family):
    model = build_tiny(family, torch.float64)
    ids = tokens(model.model_args)
    exact = model(ids)
    assert exact.dtype == torch.float64
    error = (build_tiny(family)(ids) - exact).abs().max()
    # Were a step taken in fp32, fp64 would be as far from the reference as fp32 is.
    assert (Reference(model, model.model_args.activation)(ids) - exact).abs().max() < 1e-13
    assert 1e-9 < error < 1e-4


@pytest.mark.parametrize("family", ["full", "lax"])
def test_blocks_compile_without_a_graph_break(family):
    torch._dynamo.reset()
    gate = {"lax_gate": "scalar"} if family == "lax" else {}
    model = build_tiny(family, torch.float64, n_kv_heads=2, **gate)
    ids = tokens(model.model_args)
    expected = model(ids)
    torch._dynamo.utils.counters.clear()
    for block in model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    # The compiler may replace an operator by others, which round fp64 otherwise.
    torch.testing.assert_close(model(ids), expected, rtol=1e-12, atol=1e-12)
    # One graph serves all blocks; LaX's first block, which receives nothing, is another.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (2 if family == "lax" else 1)


def split(model, first, last):
    """One pipeline stage, made as torchtitan's pipeline_module_split makes it."""
    stage = copy.deepcopy(model)
    for name in list(stage.layers):
        if not first <= int(name) < last:
            del stage.layers[name]
    if first > 0:
        stage.tok_embeddings = None
    if last < model.model_args.n_layers:
        stage.norm = stage.output = None
    return stage


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_are_the_model(family):
    model = build_tiny(family)
    ids = tokens(model.model_args)
    sent = split(model, 0, 1)(ids)
    sent = sent if isinstance(sent, tuple) else (sent,)
    assert len(sent) == (8 if family == "lax" else 1)
    last = split(model, 1, 3)
    assert torch.equal(last(*sent), model(ids))
    # Without what is carried, LaX would be another model.
    assert torch.equal(last(sent[0]), model(ids)) == (family != "lax")


def test_the_same_code_runs_on_a_shard_of_the_heads():
    """Cutting wq, wk, wv, wo by heads halves the attention; the halves add up."""
    model = randomized("full", n_kv_heads=2)
    attention, norm = model.layers["0"].attention, model.layers["0"].attention_norm
    x = torch.randn(1, 8, 48, dtype=torch.float64)
    whole, _ = attention(x, norm, model.freqs_cis, None)
    total = torch.zeros_like(whole)
    for half in range(2):
        part = copy.deepcopy(attention)
        for name in ("wq", "wk", "wv"):
            linear = getattr(part, name)
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2, 0)[half])
        part.wo.weight = torch.nn.Parameter(part.wo.weight.chunk(2, 1)[half])
        total += part(x, norm, model.freqs_cis, None)[0]
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_edges_run_in_order_under_their_names(family):
    """Every edge runs once per block, in the order of the chunks, under the name a plan uses."""
    model = build_tiny(family)
    calls = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Edge"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(tokens(model.model_args))
    block = (
        ["attention.qkv", "attention.o", "feed_forward.gate_up", "feed_forward.down"]
        if family == "full"
        else [
            f"{part}.{side}_{group}"
            for part, group in (
                ("attention", "qkv"),
                ("attention", "o"),
                ("feed_forward", "gate_up"),
                ("feed_forward", "down"),
            )
            for side in ("down", "up")
        ]
    )
    expected = ["tok_embeddings.embed"]
    expected += [f"layers.{i}.{edge}" for i in range(3) for edge in block]
    expected += ["output.head"]
    assert [name for name in calls if not name.endswith(".mix")] == expected
    assert sum(name.endswith(".mix") for name in calls) == (12 if family == "lax" else 0)


def test_training_lowers_the_loss():
    for family in FAMILIES:
        model = build_tiny(family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids = tokens(model.model_args, b=4, s=17)
        losses = []
        for _ in range(30):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], family
