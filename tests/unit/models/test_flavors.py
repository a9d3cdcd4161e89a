# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest

from tests.unit.tiny import tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.flavors import FLAVORS, write_model_args
from torchtitan_lr.titan.specs import RoPEScalingArgs


@pytest.mark.parametrize(
    ("flavor", "shape"),
    [
        ("60M", (512, 1376, 8, 8, 128, 32000)),
        ("1B", (2048, 5461, 32, 24, 512, 32000)),
        ("3B", (3072, 8192, 24, 28, 768, 32000)),
        ("7B", (4096, 11008, 32, 32, 1024, 32000)),
        ("8B", (4096, 14336, 32, 32, 1024, 128256)),
        ("debug", (128, 344, 8, 4, 32, 4096)),
        ("tiny", (256, 688, 8, 2, 64, 4096)),
    ],
)
def test_published_shapes(flavor, shape):
    a = FLAVORS["cola"][flavor]
    assert (a.dim, a.ffn_dim, a.n_heads, a.n_layers, a.rank_ffn, a.vocab_size) == shape
    assert a.rank_attention == a.rank_ffn


def test_a_file_is_a_flavor_of_its_family(tmp_path):
    path = tmp_path / "model_args.json"
    args = tiny_args("svd", rope_scaling=RoPEScalingArgs(), n_kv_heads=2)
    write_model_args(args, path)
    found = FLAVORS["svd"][str(path)]
    assert found == args and str(path) in FLAVORS["svd"]
    with pytest.raises(ConfigError, match=r"model.name: got 'llama_cola', expected 'llama_svd' as"):
        assert str(path) in FLAVORS["cola"]
    with pytest.raises(ConfigError, match=r"model.flavor: got 'nowhere.json', expected a size"):
        FLAVORS["svd"]["nowhere.json"]
