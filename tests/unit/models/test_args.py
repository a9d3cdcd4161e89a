# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from types import SimpleNamespace

import pytest
import torch

from tests.oracle.parameters import count_parameters
from tests.unit.tiny import job_config, tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel


def test_the_job_sets_length_and_seed():
    args = FLAVORS["cola"]["debug"]
    args.update_from_config(job_config(seq_len=96, seed=7))
    assert (args.max_seq_len, args.init_seed) == (96, 7)
    assert (args.rank_attention, args.rank_ffn, args.activation) == (32, 32, "both")


@pytest.mark.parametrize(
    ("overrides", "ranks"), [({"rank": 24}, (24, 24)), ({"rank": 32, "rank_ffn": 48}, (32, 48))]
)
def test_ranks_per_group(overrides, ranks):
    args = FLAVORS["cola"]["debug"]
    args.update_from_config(job_config(**overrides))
    assert (args.rank_attention, args.rank_ffn) == ranks
    with torch.device("meta"):
        block = LlamaModel(args).layers["1"]
    assert block.attention.wk.A.weight.shape == (ranks[0], 128)
    assert block.feed_forward.w2.B.weight.shape == (128, ranks[1])


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
def test_refusals_name_the_key_in_one_line(family, overrides, key):
    args = FLAVORS[family]["debug"]
    with pytest.raises(ConfigError) as caught:
        args.update_from_config(job_config(**overrides))
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "degree", "lanes", "rows"),
    [
        (0, 3, 1, 4096),  # the flavor's
        (8192, 1, 1, 8192),
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
    assert args.vocab_size == rows
    with torch.device("meta"):
        model = LlamaModel(args)
    assert model.tok_embeddings.weight.shape[0] == model.output.weight.shape[0] == rows
    assert count_parameters(args).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 50},  # 4 heads
        {"n_kv_heads": 3},
        {"n_layers": 0},
        {"family": "lora"},
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes):
    tiny_args("cola")  # the same without the change is accepted
    with pytest.raises(ConfigError):
        tiny_args(
            changes.get("family", "cola"), **{k: v for k, v in changes.items() if k != "family"}
        )


def test_placement_table():
    """CoLA, Table 10: the projections with σ in the bottleneck, and whether SwiGLU has its own."""
    names = ("q", "k", "v", "o", "gate", "up", "down")
    table = {}
    for placement in ("both", "lowrank", "reduced", "fullrank", "none"):
        args = LlamaArgs(activation=placement)
        inner = [name for name in names if args.latent_silu(name)]
        table[placement] = (inner, args.outer_silu)
    assert table == {
        "both": (list(names), True),
        "lowrank": (list(names), False),
        "reduced": (["gate"], False),
        "fullrank": ([], True),
        "none": ([], False),
    }
