# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Muon, Spectron and LoRA-Muon in one process, against their papers' forms by SVD."""

import math

import pytest
import torch
from torch import nn

from scripts.bench.spectral import polar_factor
from tests.reference.muon import usual_polar_factor
from torchtitan_lr.numerics import exact_products
from torchtitan_lr.optim.spectral import optimizer as spectral_optimizer
from torchtitan_lr.optim.spectral import rules
from torchtitan_lr.optim.spectral.matrices import select_matrices
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer

RULES = ["Muon", "Spectron", "LoRAMuon"]
FLOOR = {"LoRAMuon": 1e-7}
"""What a step with rounded Gram matrices in fp64 may lack of the exact rule."""
HYPER = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.8}


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def iterated(M):
    """The usual form of the iterations, on the singular values."""
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    x = S / S.norm()
    for a, b, c in rules.QUINTIC:
        x = a * x + b * x**3 + c * x**5
    return (U * x) @ Vh


def inverse_root(G):
    values, vectors = torch.linalg.eigh(G)
    return (vectors * values.rsqrt()) @ vectors.mT


class Linear(nn.Module):
    """B A, with A (4, 9) and B (7, 4)."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.A = nn.Linear(9, 4, bias=False, dtype=dtype)
        self.B = nn.Linear(4, 7, bias=False, dtype=dtype)
        with torch.no_grad():
            for factor in (self.A, self.B):
                factor.weight.copy_(drawn(*factor.weight.shape))

    def forward(self, x):
        return self.B(self.A(x))

    def build(self, rule, **options):
        A, B = self.A.weight, self.B.weight
        named = [("A.weight", A), ("B.weight", B)]
        return SpectralOptimizer(named, rule, [(A, B)], **HYPER | options)


def gradients(step):
    return 1e-3 * drawn(4, 9 + 2 * step)[:, :9], 1e-3 * drawn(7 + 2 * step, 4)[:7]


def expected_step(rule, A, B, N_A, N_B):
    """One step by the paper's formula; only the polynomial of msign is the optimizer's."""
    lr, decay = HYPER["lr"], HYPER["weight_decay"]
    if rule == "Muon":
        d_A, d_B = 0.2 * 9**0.5 * iterated(N_A), 0.2 * 7**0.5 * iterated(N_B)
    elif rule == "Spectron":
        bound = torch.linalg.matrix_norm(A, 2) + torch.linalg.matrix_norm(B, 2) + 1
        d_A, d_B = iterated(N_A) / bound, iterated(N_B) / bound
    else:
        R_A, R_B = inverse_root(A @ A.mT), inverse_root(B.mT @ B)
        s = (1 - lr * decay) ** 0.5
        d_A, d_B = R_B @ iterated(R_B @ N_A) / 2, iterated(N_B @ R_A) @ R_A / 2
        return s * A - lr * d_A / s, s * B - lr * d_B / s
    return (1 - lr * decay) * A - lr * d_A, (1 - lr * decay) * B - lr * d_B


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_the_papers(rule, nesterov):
    linear = Linear()
    muon = linear.build(rule, nesterov=nesterov)
    A, B = (p.detach().clone() for p in linear.parameters())
    M_A, M_B = torch.zeros_like(A), torch.zeros_like(B)
    for matrix in muon.matrices:  # one iteration per step is an estimate: start from its limit
        if matrix.u is not None:
            weight = matrix.oriented(matrix.parameter.detach())
            matrix.u.copy_(torch.linalg.svd(weight).U[:, 0])
    for step in range(2):
        G_A, G_B = gradients(step)
        linear.A.weight.grad, linear.B.weight.grad = G_A.clone(), G_B.clone()
        muon.step()
        M_A, M_B = 0.8 * M_A + 0.2 * G_A, 0.8 * M_B + 0.2 * G_B
        N_A = 0.8 * M_A + 0.2 * G_A if nesterov else M_A
        N_B = 0.8 * M_B + 0.2 * G_B if nesterov else M_B
        A, B = expected_step(rule, A, B, N_A, N_B)
        for found, wanted in ((linear.A.weight, A), (linear.B.weight, B)):
            assert (found - wanted).abs().max() < FLOOR.get(rule, 1e-12)


def test_a_pairs_change_does_not_depend_on_its_split():
    """LoRA-Muon's, up to its floor; Spectron's does."""
    C = torch.diag(torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)) + 0.2
    found = {}
    for rule in RULES:
        changes = []
        for T in (torch.eye(4, dtype=torch.float64), C):
            linear = Linear()
            with torch.no_grad():
                linear.A.weight.copy_(T @ linear.A.weight)
                linear.B.weight.copy_(linear.B.weight @ torch.linalg.inv(T))
            before = (linear.B.weight @ linear.A.weight).detach()
            linear(drawn(5, 9)).square().sum().backward()
            linear.build(rule, lr=1e-4, weight_decay=0.0).step()
            changes.append((linear.B.weight @ linear.A.weight).detach() - before)
        found[rule] = ((changes[0] - changes[1]).norm() / changes[0].norm()).item()
    assert found["LoRAMuon"] < 1e-2 < 0.1 < min(found["Spectron"], found["Muon"])


def test_what_a_rule_cannot_have_is_refused():
    with pytest.raises(ValueError, match="takes pairs of factors only"):
        SpectralOptimizer([drawn(4, 4)], "Spectron")
    with pytest.raises(ValueError, match="cannot be added"):
        SpectralOptimizer([drawn(4, 4)], "Muon").add_param_group({"params": [drawn(4, 4)]})
    shapes = {"tok_embeddings.weight": (64, 8), "layers.0.wq.weight": (8, 8), "norm.weight": (8,)}
    assert select_matrices(shapes, "matrices").names == {"layers.0.wq.weight"}
    assert not select_matrices(shapes, "factors").names


@pytest.mark.parametrize("form", ["fp32", "bf16", "split"])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
def test_the_gram_forms_error_over_condition_numbers(condition, form):
    """Against the same polynomial of M's singular values.

    A GPU's kernels split into the same numbers, with sums in fp32.
    """
    M = spectrum(math.log10(condition)).to(torch.bfloat16 if form == "bf16" else torch.float32)
    polynomial = iterated(M.double())
    U, _, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    usual, limit = usual_polar_factor(M.float()), 1e-2 if form == "split" else 1e-3
    with exact_products(form == "split"):
        ours = polar_factor(M)
    narrow = M.bfloat16()
    control = rules.inverse_root((narrow @ narrow.mT)[None])[0] @ narrow

    def error(found, wanted):
        return torch.linalg.matrix_norm(found.double() - wanted, 2).item()

    assert error(ours, polynomial) < limit
    assert error(ours, polynomial) > limit / 10 or condition == 1
    # What is left to U Vᵀ is the iterations' own: as much as in the usual form.
    assert error(ours, U @ Vh) == pytest.approx(error(usual, U @ Vh), abs=1e-3)
    # The control: with G and Q in bf16 the error is that of the signal.
    assert error(control, polynomial) > (1 if condition >= 1e2 else 10 * error(ours, polynomial))


def spectrum(decades):
    """A matrix (128, 1376) whose singular values fall by so many decades."""
    left, right = (torch.linalg.qr(drawn(n, 128))[0] for n in (128, 1376))
    values = torch.logspace(0, -decades, 128, dtype=torch.float64)
    return left * values @ right.mT


@pytest.mark.parametrize("rule", RULES)
def test_a_step_with_split_products_is_nearly_the_exact_one(rule, monkeypatch):
    changes = []
    for allowed in (False, True):
        monkeypatch.setattr(spectral_optimizer, "may_round", lambda device, is_=allowed: is_)
        linear = Linear(torch.float32)
        start = [p.detach().clone() for p in linear.parameters()]
        for p, gradient in zip(linear.parameters(), gradients(0), strict=True):
            p.grad = gradient.float()
        linear.build(rule, weight_decay=0.0).step()
        changes.append([p - q for p, q in zip(linear.parameters(), start, strict=True)])
    for exact, split in zip(*changes, strict=True):
        assert (exact - split).norm() < 1e-3 * exact.norm()
        assert torch.equal(exact, split) is (rule == "LoRAMuon")  # whose roots need more bits


@pytest.mark.parametrize("cond", [1, 1e3, 1e6])
def test_ill_conditioned_factors_never_explode(cond):
    """In fp32 the product changes by at most the rate, which exact roots guarantee."""
    values = torch.logspace(0, -torch.log10(torch.tensor(cond)).item(), 16, dtype=torch.float64)
    U, _ = torch.linalg.qr(drawn(16, 16))
    A = (U * values) @ torch.linalg.qr(drawn(64, 16))[0].mT
    B = ((U * values) @ torch.linalg.qr(drawn(48, 16))[0].mT).mT
    dW = drawn(48, 64)
    A, B, N_A, N_B = (x.float() for x in (A, B, B.mT @ dW, dW @ A.mT))
    grams = [rules.gram(x)[None] for x in (N_A, N_B.mT, A, B.mT)]
    unused = torch.empty(1, 0)
    needs = [
        rules.Needs(gram, weight, unused, unused)
        for gram, weight in zip(grams[:2], grams[2:], strict=True)
    ]
    of_A, of_B = rules.LoRAMuon().directions(needs, 64)
    change = B @ (of_A[0][0] @ N_A) + (N_B @ of_B[0][0]) @ A
    assert 0.2 < torch.linalg.matrix_norm(change, 2) < 1.3


@pytest.mark.parametrize("rule", RULES)
def test_a_factor_that_is_zero_starts(rule):
    """As B does in LoRA."""
    linear = Linear(torch.float32)
    A = linear.A.weight.detach().clone()
    nn.init.zeros_(linear.B.weight)
    muon = linear.build(rule, weight_decay=0.0)
    for step in range(2):
        linear(drawn(5, 9).float()).sub(1).square().sum().backward()
        muon.step()
        muon.zero_grad()
        assert linear.A.weight.isfinite().all() and 0 < linear.B.weight.norm() < 1
        assert linear.A.weight.equal(A) is (step == 0)


@pytest.mark.parametrize("size", [1e18, 1e20, 3e38])
@pytest.mark.parametrize("rule", RULES)
def test_finite_gradients_never_make_weights_that_are_not(rule, size):
    """A matrix whose Gram matrix overflows stays, until its momentum is small again."""
    linear = Linear(torch.float32)
    muon = linear.build(rule, weight_decay=0.0, momentum=0.5)
    for gradient_size in (size, size, *[1e-3] * 200):
        before = [p.detach().clone() for p in linear.parameters()]
        for p in linear.parameters():
            p.grad = torch.full_like(p, gradient_size)
        muon.step()
        for p, weight in zip(linear.parameters(), before, strict=True):
            assert p.isfinite().all() and (p - weight).norm() < 1
            assert p.equal(weight) is (gradient_size > 1e19) or gradient_size < 1
    assert not p.equal(weight)


def test_products_are_exact_whatever_the_run_allows(monkeypatch):
    """On a GPU a run may allow TF32, as `torch.set_float32_matmul_precision` says."""
    seen = []
    usual = rules.inverse_root
    precision = torch.get_float32_matmul_precision
    monkeypatch.setattr(rules, "inverse_root", lambda *a: seen.append(precision()) or usual(*a))
    torch.set_float32_matmul_precision("medium")
    try:
        Linear().build("Muon").step()
        assert precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}
