# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A model's definition: published shapes, what a job changes, and what is refused."""

from types import SimpleNamespace

import pytest

from tests.oracle.parameters import count_parameters
from tests.unit.tiny import job_config, tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import FLAVORS, write_model_args
from torchtitan_lr.titan.specs import RoPEScalingArgs


def test_published_shapes():
    shapes = {
        "60M": (512, 1376, 8, 8, 128, 32000),
        "1B": (2048, 5461, 32, 24, 512, 32000),
        "3B": (3072, 8192, 24, 28, 768, 32000),
        "7B": (4096, 11008, 32, 32, 1024, 32000),
        "8B": (4096, 14336, 32, 32, 1024, 128256),
        "debug": (128, 344, 8, 4, 32, 4096),
        "tiny": (256, 688, 8, 2, 64, 4096),
    }
    for flavor, shape in shapes.items():
        a = FLAVORS["cola"][flavor]
        assert (a.dim, a.ffn_dim, a.n_heads, a.n_layers, a.rank_ffn, a.vocab_size) == shape
        assert a.rank_attention == a.rank_ffn


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
    assert count_parameters(args).total == sum(n * (m[0] if m else 1) for n, *m in shapes.values())


@pytest.mark.parametrize(
    ("family", "overrides", "key"),
    [
        ("cola", {"rank": -1}, "low_rank.rank"),
        ("cola", {"activation": "gelu"}, "low_rank.activation"),
        ("lax", {"lax_gate": "vector"}, "low_rank.lax_gate"),
        ("svd", {"activation": "both"}, "low_rank.activation"),
        ("cola", {"seq_len": 0}, "training.seq_len"),
    ],
)
def test_settings_that_do_not_fit_are_refused(family, overrides, key):
    args = FLAVORS[family]["debug"]
    with pytest.raises(ConfigError) as caught:
        args.update_from_config(job_config(**overrides))
    assert caught.value.key == key and "\n" not in str(caught.value)


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


def test_placement_table():
    """CoLA, Table 10: the projections with σ in the bottleneck, and whether SwiGLU has its own."""
    names = ["q", "k", "v", "o", "gate", "up", "down"]
    table = {}
    for placement in ("both", "lowrank", "reduced", "fullrank", "none"):
        args = LlamaArgs(activation=placement)
        inner = [name for name in names if args.latent_silu(name)]
        table[placement] = (inner, args.outer_silu)
    assert table == {
        "both": (names, True),
        "lowrank": (names, False),
        "reduced": (["gate"], False),
        "fullrank": ([], True),
        "none": ([], False),
    }
