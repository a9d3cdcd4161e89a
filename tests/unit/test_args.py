# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch

from tests.unit.tiny import job_config, tiny_args
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models import FLAVORS, LlamaArgs, LlamaModel


def test_the_job_sets_length_and_seed():
    args = FLAVORS["cola"]["debug"]
    args.update_from_config(job_config(seq_len=96, seed=7))
    assert (args.max_seq_len, args.init_seed) == (96, 7)
    assert (args.rank_attention, args.rank_ffn, args.activation) == (32, 32, "both")


def test_a_missing_seed_is_zero():
    args = FLAVORS["cola"]["debug"]
    args.update_from_config(job_config(seed=None))
    assert args.init_seed == 0


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ({"rank": 24}, (24, 24)),
        ({"rank_attention": 16}, (16, 32)),
        ({"rank_ffn": 128}, (32, 128)),
        ({"rank": 32, "rank_ffn": 48}, (32, 48)),
    ],
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
        ("cola", {"rank": 65}, "low_rank.rank"),  # wk of the debug flavor has 64 outputs
        ("cola", {"rank_attention": 65}, "low_rank.rank_attention"),
        ("cola", {"rank_attention": -5}, "low_rank.rank_attention"),
        ("cola", {"rank_ffn": 129}, "low_rank.rank_ffn"),
        ("cola", {"activation": "gelu"}, "low_rank.activation"),
        ("cola", {"lax_gate": "scalar"}, "low_rank.lax_gate"),
        ("lax", {"lax_gate": "vector"}, "low_rank.lax_gate"),
        ("svd", {"activation": "both"}, "low_rank.activation"),
        ("full", {"rank": 64}, "low_rank.rank"),
        ("full", {"rank_ffn": 64}, "low_rank.rank_ffn"),
        ("full", {"activation": "lowrank"}, "low_rank.activation"),
        ("cola", {"seq_len": 0}, "training.seq_len"),
    ],
)
def test_refusals_name_the_key_in_one_line(family, overrides, key):
    args = FLAVORS[family]["debug"]
    with pytest.raises(ConfigError) as caught:
        args.update_from_config(job_config(**overrides))
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_the_largest_rank_is_accepted():
    args = FLAVORS["cola"]["debug"]
    args.update_from_config(job_config(rank_attention=64, rank_ffn=128))
    assert (args.rank_attention, args.rank_ffn) == (64, 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 50},  # 4 heads
        {"dim": 12},  # head width 3
        {"n_kv_heads": 3},
        {"n_kv_heads": 0},
        {"n_layers": 0},
        {"vocab_size": -1},
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


def test_nparams_and_flops_come_from_the_analysis():
    args = tiny_args("cola")
    model = LlamaModel(args)
    n_parameters, flops = args.get_nparams_and_flops(model, seq_len=16)
    assert n_parameters == sum(p.numel() for p in model.parameters())
    # Every parameter but the embedding's meets every token once forward and twice backward.
    linears = n_parameters - 96 * 48 - 7 * 48
    assert flops == 6 * linears + 3 * 12 * 16 * 48
