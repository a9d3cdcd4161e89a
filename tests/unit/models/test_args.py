# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A model's definition: published shapes, what a job changes, and what is refused."""

from types import SimpleNamespace

import pytest

from tests.oracle.parameters import count_parameters
from tests.unit.tiny import job_config, tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import FLAVORS, write_model_args
from torchtitan_lr.titan.specs import RoPEScalingArgs


def test_a_file_is_a_flavor_of_its_family(tmp_path):
    path = tmp_path / "model_args.json"
    args = tiny_args("svd", rope_scaling=RoPEScalingArgs(), n_kv_heads=2)
    write_model_args(args, path)
    assert FLAVORS["svd"][str(path)] == args and str(path) in FLAVORS["svd"]
    with pytest.raises(ConfigError, match=r"model.name: got 'llama_cola', expected 'llama_svd' as"):
        assert str(path) in FLAVORS["cola"]
    with pytest.raises(ConfigError, match=r"model.flavor: got 'nowhere.json', expected a size"):
        FLAVORS["svd"]["nowhere.json"]


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [({}, (32, 32)), ({"rank": 24}, (24, 24)), ({"rank": 32, "rank_ffn": 48}, (32, 48))],
)
def test_the_job_sets_ranks_length_and_seed(overrides, ranks):
    args = FLAVORS["cola"]["debug"]
    args.update_from_config(job_config(seq_len=96, seed=7, **overrides))
    assert (args.max_seq_len, args.init_seed, args.activation) == (96, 7, "both")
    shapes = model_shapes(args)
    assert shapes["layers.1.attention.wk.A.weight"] == (ranks[0], 128)
    assert shapes["layers.1.feed_forward.w2.B.weight"] == (128, ranks[1])


@pytest.mark.parametrize(
    ("wanted", "degree", "lanes", "rows"),
    [
        (0, 3, 1, 4096),  # the flavor's
        (8193, 1, 1, 8256),
        (1, 1, 1, 64),
        (4161, 4, 5, 4480),
    ],
)
def test_vocabulary_of_ones_own(wanted, degree, lanes, rows):
    config = job_config()
    config.model = SimpleNamespace(vocab_size=wanted)
    config.parallelism = SimpleNamespace(tensor_parallel_degree=degree)
    args = tiny_args("full", n_heads=40, n_kv_heads=20, dim=160, vocab_size=4096)
    if lanes > 1:
        config.caat = SimpleNamespace(lanes=lanes, sync_fraction=0.5, backward_sum="float32")
    args.update_from_config(config)
    shapes = model_shapes(args)
    assert shapes["tok_embeddings.weight"] == shapes["output.weight"] == (rows, 160)
    assert count_parameters(args) == sum(n * (m[0] if m else 1) for n, *m in shapes.values())


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("cola", {"dim": 50}, "model.n_heads"),  # 4 heads
        ("cola", {"n_kv_heads": 3}, "model.n_kv_heads"),
        ("cola", {"n_layers": 0}, "model.n_layers"),
        ("lora", {}, "model.name"),
        ("full", {"lanes": 3}, "caat.lanes"),
        ("full", {"lanes": 4, "ffn_dim": 82}, "caat.lanes"),
        ("full", {"lanes": 4, "sync_fraction": 1.1}, "caat.sync_fraction"),
        ("full", {"lanes": 1, "sync_fraction": 0.5}, "caat.sync_fraction"),
        ("lax", {"lanes": 2}, "caat.lanes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(family, changes, key):
    with pytest.raises(ConfigError) as caught:
        tiny_args(family, **changes)
    assert caught.value.key == key and "\n" not in str(caught.value)
