# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Families of equal parameters: their widths, counted on real models."""

import pytest
import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.shapes import model_of

TOML = """
name = "x"
config = "debug_full"
match = "parameters"

[families.full]
[families.cola]
[families.lax]

[sizes.a]
dim = 32
ffn_dim = 88
n_layers = 3
n_heads = 2
vocab_size = 300
"""


def read(tmp_path, old="", new=""):
    assert old in TOML
    (tmp_path / "x.toml").write_text(TOML.replace(old, new, 1) if old else TOML)
    return read_experiment(str(tmp_path / "x.toml"))


def built(experiment, family, whole=False):
    args = model_of(experiment, family, "a")
    with torch.device("meta"):
        model = LlamaModel(args)
    outside = ("tok_embeddings", "output")
    parts = [p.numel() for name, p in model.named_parameters() if whole or outside[0] not in name]
    head = 0 if whole else args.dim * args.vocab_size
    return args, sum(parts) - head


@pytest.mark.parametrize("whole", [False, True])
def test_low_rank_families_are_wider_and_have_as_many_parameters(tmp_path, whole):
    old, new = ('name = "x"', f'name = "x"\ncount = "{"all" if whole else "without_vocabulary"}"')
    experiment = read(tmp_path, old, new)
    full, wanted = built(experiment, "full", whole)
    assert (full.dim, full.ffn_dim) == (32, 88)
    for family in ("cola", "lax"):
        args, found = built(experiment, family, whole)
        # One more or less of f is 9 r parameters; N is at most half of that away.
        assert abs(found - wanted) <= 0.51 * 9 * args.rank_ffn
        assert args.dim > full.dim and args.rank_attention == args.dim // 4
        assert args.dim % (2 * args.n_heads) == 0 and args.n_layers == 3
        assert args.ffn_dim / args.dim == pytest.approx(88 / 32, rel=0.2)


def test_without_it_the_sides_are_equal_and_the_parameters_are_not(tmp_path):
    experiment = read(tmp_path, 'match = "parameters"', 'match = "sides"')
    (full, wanted), (cola, found) = (built(experiment, f) for f in ("full", "cola"))
    assert (cola.dim, cola.ffn_dim) == (full.dim, full.ffn_dim) and found < 0.6 * wanted


def test_what_cannot_be_matched_is_one_line(tmp_path):
    sides = "dim = 32\nffn_dim = 88\nn_layers = 3\nn_heads = 2"
    with pytest.raises(ConfigError, match=r"sizes.a.flavor: got 'debug', expected dim"):
        read(tmp_path, sides, 'flavor = "debug"')
    narrow = read(tmp_path, "dim = 32\nffn_dim = 88", "dim = 4\nffn_dim = 4\nrank = 64")
    with pytest.raises(ConfigError, match=r"sizes.a: got 'N = 364', expected a size"):
        model_of(narrow, "cola", "a")
