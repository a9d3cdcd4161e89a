# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An experiment's file, its learning rates and its commits, without runs."""

import math
import subprocess

import pytest

from tests.commands import ROOT
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling.costs import Cost, check_overrides
from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.rates import choose, search
from torchtitan_lr.scaling.runner import current_commit, slots_of

TOML = """
name = "x"
config = "debug_full"
seeds = [1, 2]

[learning_rate]
grid = [1e-3, 2e-3, 4e-3]
search = ["a", "b"]
rule = "power"

[families.full]
[families.cola]

[sizes.a]
flavor = "debug"

[sizes.b]
flavor = "tiny"
seeds = [5]

[sizes.c]
dim = 64
ffn_dim = 176
n_layers = 2
n_heads = 2
"""


def read(tmp_path, old="", new=""):
    assert old in TOML
    path = tmp_path / "x.toml"
    path.write_text(TOML.replace(old, new, 1) if old else TOML)
    return read_experiment(str(path))


def test_an_experiment_is_read(tmp_path):
    experiment = read(tmp_path)
    assert list(experiment.families) == ["full", "cola"]
    assert (experiment.seeds_of("a"), experiment.seeds_of("b")) == ([1, 2], [5])
    assert experiment.budgets_of("c") == [20.0] and experiment.sizes["c"].dim == 64


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "x"', 'name = "x"\nnames = 1', "names: got 1"),
        ("seeds = [1, 2]", "seeds = 3", "seeds: got 3, expected a list of integers"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "different numbers"),
        ("seeds = [5]", "sedes = [5]", "sizes.b.sedes: got [5], expected one of flavor"),
        ('flavor = "tiny"', 'flavor = "tiny"\ndim = 3', "sizes.b: got 'tiny', expected either"),
        ("grid = [1e-3, 2e-3, 4e-3]", "grid = [1e-3, 2e-3]", "one value, or at least three"),
        ('search = ["a", "b"]', 'search = ["z"]', "learning_rate.search: got 'z'"),
        ('search = ["a", "b"]', 'search = ["a"]', "at least two sizes"),
        ("n_heads = 2", "n_heads = 2.5", "sizes.c.n_heads: got 2.5"),
        ("debug_full", "debug_none", "config: got 'debug_none'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, old, new, message):
    with pytest.raises(ConfigError) as info:
        read(tmp_path, old, new)
    assert message in str(info.value) and "\n" not in str(info.value)


def test_own_keys_are_refused(tmp_path):
    override = '[families.cola]\noverrides = ["optimizer.lr=1"]'
    with pytest.raises(ConfigError, match=r"families.cola.overrides: optimizer.lr"):
        check_overrides(read(tmp_path, "[families.cola]", override))


@pytest.mark.parametrize("path", sorted(ROOT.glob("train_configs/experiments/*.toml")))
def test_shipped_experiments(path):
    assert read_experiment(path.stem).name == path.stem


def test_a_best_value_is_inside_its_grid():
    losses = {1.0: 3.0, 2.0: 2.0, 4.0: 2.5}
    assert search([1.0, 2.0, 4.0], losses, 0).best == 2.0
    losses[2.0] = 2.7
    edge = search([1.0, 2.0, 4.0], losses, 0)
    assert (edge.best, edge.edge) == (None, 4.0)
    grown = search([1.0, 2.0, 4.0], losses, 1)
    assert grown.missing == [8.0] and grown.best is None
    # A value at which training diverges bounds the grid.
    assert search([1.0, 2.0, 4.0], losses | {8.0: math.inf}, 1).best == 4.0


def test_rules_lead_beyond_the_searched_sizes(tmp_path):
    experiment = read(tmp_path)
    sizes = {"a": (100, 10), "b": (400, 20), "c": (1600, 40)}
    costs = {
        (family, size): Cost(n, n, width, 1, 1, 0.0, 0.0)
        for family in experiment.families
        for size, (n, width) in sizes.items()
    }
    best = {"a": 2e-3, "b": 1.5e-3}

    def losses_of(family, size):
        return {rate: abs(rate - best[size]) for rate in (1e-3, 1.5e-3, 2e-3, 4e-3)}

    # b's best value of the grid is 1e-3 or 2e-3, equally far: the smaller, an edge; so it grows.
    best["b"] = 2.1e-3
    chosen = choose(experiment, costs, losses_of)
    assert chosen["full", "a"].rate == chosen["full", "b"].rate == 2e-3
    assert (chosen["cola", "c"].rate, chosen["cola", "c"].how) == (2e-3, "power")
    # The control: without a result there is no rate.
    assert choose(experiment, costs, lambda family, size: {})["cola", "c"].rate is None


def test_a_commit_names_uncommitted_changes(tmp_path):
    def git(*arguments):
        person = ["-c", "user.name=x", "-c", "user.email=x@x"]
        subprocess.run(["git", "-C", str(tmp_path), *person, *arguments], check=True)

    (tmp_path / "__init__.py").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    clean = current_commit(tmp_path)
    assert len(clean) == 12
    seen = {clean}
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "__init__.py").write_text(text)
        seen.add(current_commit(tmp_path))
    assert len(seen) == 3 and all(commit.startswith(clean) for commit in seen)


def test_runs_at_once_have_devices_of_their_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert slots_of(0, 2, "cuda", 5) == ["0,1", "2,3"]
    assert slots_of(3, 1, "cpu", 0) == ["", "", ""]
    with pytest.raises(ConfigError, match="--jobs: got 3, expected at most 2"):
        slots_of(3, 2, "cuda", 5)
