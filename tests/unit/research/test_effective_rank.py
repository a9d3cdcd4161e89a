# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Effective ranks (CoLA, Eq. 1), and ``scripts/activation_rank.py``."""

import json

import pytest
import torch

from scripts.research.effective_rank import activation_spectra, effective_rank, energies
from tests.scripts import load_script
from tests.unit.hf.test_export import write_run
from tests.unit.tiny import FAMILIES, build_tiny, tokens

script = load_script("activation_rank")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("alpha", "rank"), [(0.1, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.9, 3), (0.91, 4), (1.0, 4)]
)
def test_definition(alpha, rank):
    assert effective_rank(torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).double(), alpha) == rank


def test_edges_of_the_definition():
    assert effective_rank(torch.zeros(3), 0.9) == 0
    for alpha in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            effective_rank(torch.ones(3), alpha)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (12, 12)])
def test_energies_are_squared_singular_values(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svdvals(matrix.double()).square()
    torch.testing.assert_close(energies(matrix), expected, rtol=1e-12, atol=1e-12)
    # The control: they are not the singular values, nor those of the centred matrix.
    assert not torch.allclose(energies(matrix), expected.sqrt())
    assert not torch.allclose(energies(matrix - matrix.mean(0)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_of_every_block(family):
    model = build_tiny(family, n_kv_heads=2)
    args = model.model_args
    spectra = activation_spectra(model, tokens(args, b=2, s=16))
    names = [(s.block, s.projection, s.what) for s in spectra]
    assert len(set(names)) == len(names) == args.n_layers * (8 if family == "full" else 15)
    widths = {(s.projection, s.what): s.width for s in spectra}
    assert widths["k", "output"] == args.kv_dim < widths["q", "output"] == args.dim
    assert widths["hidden", "output"] == args.ffn_dim
    if family != "full":
        assert widths["down", "latent"] == args.rank_ffn
    assert not model.layers["0"]._forward_hooks  # nothing is left behind
    assert len(activation_spectra(model, tokens(args, b=2, s=16))) == len(spectra)


def test_a_factor_of_rank_two_is_found():
    model = build_tiny("cola")
    b = model.layers["1"].attention.wv.B.weight
    with torch.no_grad():
        b.copy_(b[:, :2] @ torch.randn(2, b.shape[1]))
    spectra = activation_spectra(model, tokens(model.model_args, b=4, s=32))
    ranks = {(s.block, s.projection): s for s in spectra if s.what == "output"}
    assert effective_rank(ranks[1, "v"].energies, 0.999999) == 2
    assert effective_rank(ranks[0, "v"].energies, 0.999999) > 2  # the control
    # An output is no richer than the latent it is made from.
    latents = {(s.block, s.projection): s for s in spectra if s.what == "latent"}
    for key, latent in latents.items():
        assert int((ranks[key].energies > 1e-9 * ranks[key].energies[0]).sum()) <= latent.width


def call(capsys, *arguments):
    try:
        status = script.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def test_the_command(tmp_path, capsys):
    step, _ = write_run(tmp_path, "cola")
    text = tmp_path / "held_out.txt"
    text.write_text("import os\nprint(os.getcwd())\n" * 80)
    common = [step, "--text", text, "--tokens=512", "--alpha=0.5,0.95"]
    picture = tmp_path / "x" / "rank.png"
    status, out, _ = call(capsys, *common, "--json", f"--out={picture}")
    assert status == 0
    rows = json.loads(out)
    assert len(rows) == 4 * 15
    assert all(0 < r["rank"]["0.5"] <= r["rank"]["0.95"] <= r["width"] for r in rows)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    status, out, _ = call(capsys, *common, "--out=")
    assert status == 0
    assert out.splitlines()[0].split() == [
        *("block", "projection", "what", "width", "r(0.5)", "r(0.95)")
    ]
    assert call(capsys, *common, "--out=")[2] == ""  # enough tokens
    _, _, err = call(capsys, *common[:3], "--tokens=64", "--out=")
    assert err == "note: every rank is at most the 64 tokens; use at least 344\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--alpha=2"], "--alpha: got [2.0]"),
        (["--alpha=all"], "--alpha: got 'all'"),
        (["--tokens=0"], "--tokens: got 0, expected at least 1"),
        (["--text=no.txt"], "--text: got 'no.txt', expected a text file"),
        ([], "--text: got None"),  # the record of this run names no text
        (["--beams=4"], "--beams"),
    ],
)
def test_refusals(tmp_path, capsys, options, told):
    step, _ = write_run(tmp_path, "cola")
    status, out, err = call(capsys, step, *options)
    assert (status, out) == (2, "")
    assert told in err and err.count("\n") == 1
