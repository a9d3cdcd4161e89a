# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A dense model becomes llama_svd block by block, and its errors are those of its activations."""

from dataclasses import replace

import pytest
import torch

from tests.commands import Command
from tests.unit.tiny import build_tiny
from torchtitan_lr.hf.svd_import import factorise, truncate
from torchtitan_lr.models.state_dict_adapter import merge_factors
from torchtitan_lr.training.loading import as_model

import_hf = Command("import")

LINEARS = [f"attention.w{x}" for x in "qkvo"] + [f"feed_forward.w{i}" for i in (1, 2, 3)]


def batches(number=3, b=2, s=12, padding=5):
    """Random tokens; the last row of the last batch ends in padding."""
    generator = torch.Generator().manual_seed(9)
    for index in range(number):
        tokens = torch.randint(96, (b, s), generator=generator)
        labels = tokens.clone()
        if index == number - 1:
            labels[-1, s - padding :] = -100
        yield {"input": tokens}, labels


# What the block calls in the place of these linears, with the same input.
EDGES = {"attention.wo": "attention.o", "feed_forward.w2": "feed_forward.out"}


@pytest.fixture
def dense():
    model = build_tiny("full", torch.float64, n_kv_heads=2, max_seq_len=12)
    for parameter in model.parameters():
        parameter.data *= 3
    return model


def cut_to(model, rank, calibration=None):
    made = replace(
        model.model_args, family="svd", activation="fullrank", rank_attention=rank, rank_ffn=rank
    )
    held = model.state_dict()
    weights, reports = factorise(model.model_args, held, made, calibration)
    assert held.keys() == weights.keys()  # no dense matrix is left in memory
    return as_model(made, weights), reports


def inputs_of(model):
    """What each linear of the dense model gets from the text, by hooks on the whole model."""
    found = {}

    def note(name):
        def hook(module, inputs):
            found.setdefault(name, []).append(inputs[0][valid])

        return hook

    for index in range(model.model_args.n_layers):
        for linear in LINEARS:
            name = f"layers.{index}.{linear}"
            called = f"layers.{index}.{EDGES.get(linear, linear)}"
            model.get_submodule(called).register_forward_pre_hook(note(name))
    with torch.no_grad():
        for inputs, labels in batches():
            valid = labels >= 0
            model(inputs["input"])
    return {name: torch.cat(parts) for name, parts in found.items()}


def test_at_the_full_rank_the_logits_are_the_dense_models(dense):
    made, _ = cut_to(dense, 48)
    tokens = next(iter(batches()))[0]["input"]
    expected = dense(tokens)
    assert ((made(tokens) - expected).abs().max() / expected.abs().max()) < 1e-12
    cut, _ = cut_to(dense, 40)
    assert ((cut(tokens) - expected).abs().max() / expected.abs().max()) > 1e-3


def test_reported_errors_are_those_over_the_activations_of_the_whole_model(dense):
    made, reports = cut_to(dense, 12, batches())
    inputs, merged = inputs_of(dense), merge_factors(made.state_dict())
    assert sorted(inputs) == sorted(report.name for report in reports)
    plain = {report.name: report for report in cut_to(dense, 12)[1]}
    for report in reports:
        weight = dense.get_parameter(f"{report.name}.weight").detach()
        lost, x = weight - merged[f"{report.name}.weight"], inputs[report.name].T
        assert len(x.T) == 67 and report.rank == 12
        assert report.error == pytest.approx(float(lost.norm() / weight.norm()), rel=1e-9)
        # The stream is carried in fp32.
        over_text = float((lost @ x).norm() / (weight @ x).norm())
        assert report.weighted_error == pytest.approx(over_text, rel=1e-4)
        assert plain[report.name].error < report.error and plain[report.name].weighted_error is None


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uneven(n, d):
    """Inputs (n, d) whose directions differ a hundredfold in size."""
    sizes = torch.logspace(0, -2, d, dtype=torch.float64)
    return (draw(n, d, seed=1) * sizes) @ draw(d, d, seed=2)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_the_plain_error_is_the_tail_of_the_singular_values(shape):
    weight = draw(*shape)
    A, B, error, weighted = truncate(weight, 5)
    sizes = torch.linalg.svdvals(weight)
    tail = (sizes[5:].square().sum() / sizes.square().sum()).sqrt()
    assert abs(error - tail) < 1e-13 and weighted is None
    assert A.shape == (5, shape[1]) and B.shape == (shape[0], 5)
    assert torch.allclose(A @ A.T, B.T @ B, atol=1e-12)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_whitening_is_svd_llms_formula(shape):
    weight, inputs = draw(*shape), uneven(300, shape[1])
    moments = inputs.T @ inputs
    A, B, error, weighted = truncate(weight, 5, moments)
    # Wang et al. (2024), section 3.1: S of Cholesky, W' = U_r Σ_r V_rᵀ S⁻¹.
    root = torch.linalg.cholesky(moments)
    left, sizes, right = torch.linalg.svd(weight @ root, full_matrices=False)
    paper = (left[:, :5] * sizes[:5]) @ torch.linalg.solve_triangular(
        root, right[:5], upper=False, left=False
    )
    assert ((B @ A - paper).norm() / paper.norm()) < 1e-6
    outputs = weight @ inputs.T
    lost = ((weight - B @ A) @ inputs.T).norm() / outputs.norm()
    assert abs(weighted - lost) < 1e-6
    tail = (sizes[5:].square().sum() / sizes.square().sum()).sqrt()
    assert abs(lost - tail) < 1e-6
    A, B, least, _ = truncate(weight, 5)
    worse = ((weight - B @ A) @ inputs.T).norm() / outputs.norm()
    assert worse > 1.3 * lost and error > least


def test_a_rank_above_a_narrow_side_loses_nothing_and_trains():
    weight = draw(6, 16)
    A, B, error, _ = truncate(weight, 10, seed=3)
    assert error < 1e-14
    assert (B @ A - weight).abs().max() < 1e-13
    A, B = A.requires_grad_(), B.requires_grad_()
    (B @ A).square().sum().backward()
    assert A.shape == (10, 16) and (B.grad[:, 6:].norm(dim=0) > 0.1).all()
