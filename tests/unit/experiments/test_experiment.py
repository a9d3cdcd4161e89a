# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An experiment from its file to the fit, with a program in place of the training.

The fit finds the exponents of the law that made the losses, and no others.
"""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scripts.research import finished_runs
from tests.commands import ROOT, Command
from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.experiments import results
from torchtitan_lr.experiments.experiment import read_experiment
from torchtitan_lr.experiments.plan import Plan
from torchtitan_lr.experiments.results import fit_law, fit_points, fits_of, law_table
from torchtitan_lr.experiments.start import run_on_ranks
from torchtitan_lr.experiments.sweep import settings_of
from torchtitan_lr.models.flavors import read_model_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.spectral.matrices import select_matrices
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer

scaling = Command("scaling")

TOML = """
name = "x"
config = "debug_full"
overrides = ["training.local_batch_size=2", "training.global_batch_size=-1", "validation.steps=1"]
seeds = [0, 1]
tokens_per_parameter = [0.05]
learning_rates = [5e-4, 1e-3, 2e-3]
search = ["a"]

[families.full]
[families.cola]

[sizes.a]
dim = 32
ffn_dim = 88
n_layers = 1
n_heads = 2

[sizes.b]
dim = 64
ffn_dim = 176
n_layers = 1
n_heads = 2
seeds = [5]
"""


def write(tmp_path, *changes):
    text = TOML
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "x.toml"
    path.write_text(text)
    return str(path)


def plan_of(tmp_path, *changes):
    return Plan(read_experiment(write(tmp_path, *changes)), tmp_path / "work")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "x"', 'name = "x"\nnames = 1', "names: got 1"),
        ("seeds = [0, 1]", "seeds = 3", "seeds: got 3, expected"),
        ("seeds = [0, 1]", "seeds = [1.5]", "seeds: got [1.5], expected a list of integers"),
        ("seeds = [5]", "sedes = [5]", "seeds, budgets (did you mean seeds?)"),
        ("rates = [5e-4, 1e-3, 2e-3]", "rates = [1e-3, 2e-3]", "at least three in ascending order"),
        ('search = ["a"]', 'search = ["z"]', "search: got ['z']"),
        ("debug_full", "debug_none", "job.config_file: got 'debug_none'"),
        ("[families.cola]", "[families.coal]", "families.coal: model.name: got 'llama_coal'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, old, new, message):
    arguments = ["plan", write(tmp_path, (old, new)), f"--out={tmp_path / 'o'}"]
    assert message in scaling.refusal(capsys, *arguments)


def test_our_experiments():
    for folder in ("train_configs", "scripts/research"):
        paths = sorted(ROOT.glob(f"{folder}/experiments/*.toml"))
        assert paths
        for path in paths:
            name = path.stem if folder == "train_configs" else str(path)
            assert read_experiment(name).name == path.stem


def test_stored_runs_name_their_models_alike_from_any_folder(tmp_path, monkeypatch):
    """A run that is stored a second time by another path is not new: its commit stays."""
    monkeypatch.setattr(finished_runs, "FOLDER", tmp_path)
    model = "--model.flavor=outputs/x/models/cola.json"
    settings = {"optimizer.name": "from outside"}
    record = {"settings": settings, "arguments": ["file", model], "row": {"status": "finished"}}
    (tmp_path / "outputs/x/a").mkdir(parents=True)
    (tmp_path / "outputs/x/a/point.json").write_text(json.dumps(record))
    first = {"commit": "1", "torch": "2"}
    (tmp_path / "outputs/x/versions.json").write_text(json.dumps(first))
    monkeypatch.chdir(tmp_path)
    finished_runs.store("x", Path("outputs/x"))
    stored = finished_runs.stored_runs("x")
    (tmp_path / "outputs/x/versions.json").write_text(json.dumps(first | {"commit": "9"}))
    finished_runs.store("x", tmp_path / "outputs/x")
    assert finished_runs.stored_runs("x") == stored
    assert stored["a"]["arguments"][1] == "--model.flavor=WORK/models/cola.json"


def test_the_command_line_wins(tmp_path):
    family = '[families.cola]\noverrides = ["training.seq_len=32", "optimizer.beta1=0.5"]'
    path = write(tmp_path, ("[families.cola]", family))
    given = ["--training.seq_len=64", "--validation.seq_len=64"]
    plan = Plan(read_experiment(path, given), tmp_path / "work")
    settings = {name: settings_of(plan.point(name, "a", 1.0, 0, 1e-3)) for name in ("full", "cola")}
    assert [found["training.seq_len"] for found in settings.values()] == [64, 64]
    assert settings["cola"]["optimizer.beta1"] == 0.5 != settings["full"]["optimizer.beta1"]
    assert "optimizer.tsr_rank" not in settings["cola"]  # AdamW does not read it


def test_lengths_by_hand(tmp_path):
    """N of full rank, without the vocabulary: 4 d^2 + 3 d f + 2 d, and d of the last norm."""
    n = 4 * 32**2 + 3 * 32 * 88 + 3 * 32
    for equal in ("tokens_per_parameter", "tokens", "flops"):
        plan = plan_of(tmp_path, ('name = "x"', f'name = "x"\nequal = "{equal}"'))
        full, cola = (plan.arms[family, "a"] for family in ("full", "cola"))
        assert full.counted == n > 2 * cola.counted
        one, two = (plan.point(f, "a", 4.0, 0, 1e-3).settings for f in ("full", "cola"))
        assert one["D"] == round(4.0 * n / full.tokens_per_step) * full.tokens_per_step
        assert one["FLOPs"] == one["D"] * full.flops_per_token
        wanted = 4.0 * (cola.counted if equal == "tokens_per_parameter" else n)
        if equal == "flops":
            wanted *= full.flops_per_token / cola.flops_per_token
        assert two["D"] == pytest.approx(wanted, abs=cola.tokens_per_step / 2)


@pytest.mark.parametrize(("family", "rule"), [("full", "Muon"), ("svd", "LoRAMuon")])
def test_the_flops_of_a_spectral_optimizer_count(tmp_path, family, rule):
    """Against torch's count of a real step."""
    arm = f'[families.x]\nmodel = "llama_{family}"\noverrides = ["optimizer.name={rule}"]'
    plan = plan_of(tmp_path, ("[families.cola]", f"[families.svd]\n{arm}"))
    with_rule, plain = plan.arms["x", "a"], plan.arms[family, "a"]
    counted = (with_rule.flops_per_token - plain.flops_per_token) * plain.tokens_per_step
    model = LlamaModel(read_model_args(tmp_path / "work" / "models" / f"{family}_a.json"))
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    chosen = select_matrices(shapes, ENTRIES[rule].updates)
    for name in chosen.names:
        parameters[name].grad = torch.zeros_like(parameters[name])
    pairs = [(parameters[a], parameters[b]) for a, b in chosen.pairs]
    optimizer = SpectralOptimizer([parameters[n] for n in chosen.names], rule, pairs)
    # Torch counts products into new tensors only.
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **more: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        optimizer.step()
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-9) and counted > 0


def test_a_best_value_is_inside_its_grid(tmp_path):
    """A grid goes on by the ratio of its last two rates, and a rate that diverges bounds it."""
    plan = plan_of(tmp_path, ("[5e-4, 1e-3, 2e-3]", "[1e-3, 2e-3, 6e-3]"))
    for losses, new, rate in (
        ({}, [1e-3, 2e-3, 6e-3], None),
        ({1e-3: 3.0, 2e-3: 2.0}, [6e-3], None),
        ({1e-3: 3.0, 2e-3: 2.0, 6e-3: 2.5}, [], 2e-3),
        ({1e-3: 3.0, 2e-3: 2.7, 6e-3: math.inf}, [], 2e-3),
        ({1e-3: 3.0, 2e-3: 2.7, 6e-3: 2.5}, [1.8e-2], None),
        ({1e-3: 3.0, 2e-3: 2.7, 6e-3: 2.5, 1.8e-2: 2.6}, [], 6e-3),
        ({1e-3: 2.0, 2e-3: 2.7, 6e-3: 2.8}, [5e-4], None),
        ({1e-3: 2.0, 2e-3: 2.7, 6e-3: 2.8, 5e-4: 1.0}, [2.5e-4], None),
    ):
        known = {plan.point("full", "a", 0.05, 0, at).name: loss for at, loss in losses.items()}
        searched = plan.searched(known)
        full = [point.settings for point in searched.points if point.settings["family"] == "full"]
        assert sorted({setting["learning_rate"] for setting in full} - losses.keys()) == new
        assert searched.rates["full", "a"] == searched.rates["full", "b"] == rate
        assert not searched.edges
    # A search without end is given up, and says so.
    rates = [1e-3, 2e-3, 6e-3, *(float(f"{6e-3 * 3**k:.3g}") for k in range(1, 9))]
    known = {plan.point("full", "a", 0.05, 0, at).name: -at for at in rates}
    searched = plan.searched(known)
    assert searched.rates["full", "a"] is None and len(searched.edges) == 1


def test_an_experiment_from_its_search_to_the_table(tmp_path, standin, capsys):
    path, work = write(tmp_path, ("[5e-4, 1e-3, 2e-3]", "[1e-3, 2e-3, 4e-3]")), tmp_path / "work"
    assert scaling.main(["plan", path, f"--out={work}"]) == 0
    # Three rates of two families, and two sizes with two and one seeds.
    assert "\n12 runs, 12 to do, " in capsys.readouterr().out
    command = [path, f"--out={work}", "--training.seq_len=64", "--validation.seq_len=64"]
    assert scaling.main(["run", *command, "--jobs=2"]) == 0
    names = [argument[1].rpartition("/")[2] for argument in standin]
    searched = [f"cola_a_0.05_seed0_lr{rate:g}" for rate in (1e-3, 2e-3, 4e-3)]
    main = ["cola_a_0.05_seed1_lr0.002", "cola_b_0.05_seed5_lr0.002"]
    assert sorted(n for n in names if n[0] == "c") == sorted([*searched, *main])
    assert len(names) == 10 == len({*names})
    groups = {a for argv in standin for a in argv if "wandb_group" in a}
    assert groups == {"--metrics.wandb_group=x"}
    capsys.readouterr()
    assert scaling.main(["plan", *command]) == 0
    assert "10 runs, 0 to do" in capsys.readouterr().out
    assert scaling.main(["fit", *command]) == 0
    out = capsys.readouterr().out
    # Two seeds, 5.00 and 5.01: t(0.975, 1) = 12.706205 times their standard error of 0.005.
    assert out.count(f"| 5.0050 [{5.005 - 0.06353:.4f}, {5.005 + 0.06353:.4f}] |") == 2
    assert out.count("| +0.0000 [+0.0000, +0.0000] |") == 1 and out.count("| 5.0500 |") == 2
    found = json.loads((work / "scaling.json").read_text())
    assert [point["losses"] for point in found["points"]] == [
        {"0": 5.0, "1": 5.01},
        {"5": 5.05},
    ] * 2
    assert (work / "scaling.png").read_bytes()[:4] == b"\x89PNG"


def row(size, flops):
    loss = 1.8 + 3 * (flops / 1e10) ** -0.2
    setting = {"family": "a", "size": size, "FLOPs": flops}
    return setting | {"loss": (loss, None, None), "losses": {0: loss}}


def test_one_size_and_one_budget_are_drawn_as_a_row_per_family(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(results, "finish", lambda figure, *_: figures.append(figure))
    size = {"tokens_per_parameter": 1.0, "equal": "tokens", "learning_rate": 1e-3}
    size |= {"N": 1, "D": 1, "seeds": 1, "minus_reference": None}
    rows = [row("a", flops) | size | {"family": name} for name, flops in (("x", 1e10), ("y", 2e10))]
    plan = plan_of(tmp_path)
    for drawn in (rows, [rows[0], rows[1] | {"size": "b"}]):  # the second: two sizes
        results.write(plan, [], drawn, {})
    labels = [[text.get_text() for text in f.axes[0].get_yticklabels()] for f in figures]
    assert labels[0] == ["x", "y"] != labels[1] and len(figures[0].axes) == 2


def test_a_law_is_fitted_to_what_no_cheaper_point_beats():
    rows = [row(n, 120.0 * n * 20 * n) for n in (10**5, 10**6, 10**7, 10**8)]
    worse = row(9, 6e17) | {"loss": rows[0]["loss"], "losses": rows[0]["losses"]}
    fits = fits_of([worse, *rows])
    (fit,) = fits.values()
    assert (fit.law.alpha, fit.law.floor) == pytest.approx((0.2, 1.8), rel=1e-3)
    _, low, high = fit.interval("alpha")
    assert low <= fit.law.alpha <= high
    assert fits_of(rows[:3]) == {}
    # The table has how many points were fitted, and the largest error.
    last = law_table([worse, *rows], fits).splitlines()[-1].split(" | ")
    assert last[0] == "| a" and last[1] == "4 of 5" and abs(float(last[-1].strip(" |"))) < 0.01


def test_ranks_that_fail_are_one_line_and_a_folder(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from torchtitan_lr.experiments.start import report_from_rank\n"
        "report_from_rank(lambda _: 1 // 0, [])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RunFailedError) as info:
        run_on_ranks("broken", [], ranks=1)
    (kept,) = tmp_path.glob("torchtitan_lr-ranks-*/*/attempt_0/0")
    line = "error: rank 0 failed: ZeroDivisionError: integer division or modulo by zero"
    assert str(info.value) == f"{line}; its output: {kept}"
    assert "Traceback" in (kept / "stderr.log").read_text()


NOISE = 0.003  # standard deviation of log L, about that of seeds


def test_the_true_exponent_is_in_nearly_all_intervals():
    flops = np.repeat(np.geomspace(1e12, 1e16, 8), 3)
    held = 0
    for seed in range(6):
        noise = NOISE * np.random.default_rng(seed).standard_normal(len(flops))
        losses = (1.8 + 3 * (flops / 1e12) ** -0.2) * np.exp(noise)
        _, low, high = fit_points(np.column_stack([flops, losses]), 60).interval("alpha")
        held += low < 0.2 < high
        assert high - low < 0.03  # the control: other exponents are not held
    assert held >= 5


def test_one_wrong_point_hardly_moves_the_fit():
    flops = np.geomspace(1e12, 1e16, 12)
    losses = 1.5 + 3 * (flops / 1e12) ** -0.2
    losses[5] *= 1.2
    assert fit_law(np.column_stack([flops, losses])).alpha == pytest.approx(0.2, abs=0.01)
