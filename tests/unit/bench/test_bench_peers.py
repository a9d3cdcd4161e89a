# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from scripts.bench import peers
from scripts.check import bench_peers
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter

WORKLOAD = peers.Workload("debug", batch=1, seq_len=16, layers=2)
SMALL = [
    "--flavor",
    "debug",
    "--layers",
    "1",
    "--batch",
    "1",
    "--seq_len",
    "16",
    "--steps",
    "3",
    "--warmup",
    "1",
    "--threads",
    "1",
]


def runners(*names):
    """Some of the peers, each with weights of its own."""
    return [peers.Runner(name, WORKLOAD) for name in names]


def published_weights(ours, args):
    """Our factors by the published formula's names and layouts, for Hugging Face's rotary pairs."""
    permute = LlamaStateDictAdapter(replace(args, family="full"), None)._permute
    names = dict(zip(("wq", "wk", "wv", "wo", "w1", "w3", "w2"), peers.LINEARS, strict=True))
    found = {}
    for i, block in ours.layers.items():
        for name, theirs in names.items():
            part = "attention" if theirs in peers.LINEARS[:4] else "feed_forward"
            linear = getattr(getattr(block, part), name)
            b = linear.B.weight
            if name in ("wq", "wk"):
                heads = args.n_heads if name == "wq" else args.kv_heads
                b = permute(b, heads, b.shape[0], b.shape[1])
            stem = f"model.layers.{i}.{'self_attn' if part == 'attention' else 'mlp'}.{theirs}"
            found |= {f"{stem}.A": linear.A.weight.T, f"{stem}.B": b.T}
        found[f"model.layers.{i}.input_layernorm.weight"] = block.attention_norm.weight
        found[f"model.layers.{i}.post_attention_layernorm.weight"] = block.ffn_norm.weight
    found["model.embed_tokens.weight"] = ours.tok_embeddings.weight
    found |= {"model.norm.weight": ours.norm.weight, "lm_head.weight": ours.output.weight}
    return found


def test_the_peers_compute_what_ours_do():
    """With our weights the logits are the same: the shapes and the formulas are."""
    full, titan, transformers = runners("full", "titan", "transformers")
    titan.model.load_state_dict(full.model.state_dict())  # the names are the same
    adapter = LlamaStateDictAdapter(WORKLOAD.args("full"), None)
    transformers.model.model.load_state_dict(adapter.to_hf(full.model.state_dict()))
    cola, published = runners("cola", "published")
    args = WORKLOAD.args("cola")
    published.model.model.load_state_dict(published_weights(cola.model, args))
    for ours, theirs in ((full, titan), (full, transformers), (cola, published)):
        expected = ours.model(ours.tokens)
        found = theirs.model(ours.tokens)
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < 1e-5
        # The control: another nonlinearity, or a block without its attention, is another model.
        with patch.object(peers.F, "silu", torch.tanh) if theirs is published else _broken(theirs):
            found = theirs.model(ours.tokens)
        assert (found - expected).abs().max() / expected.abs().max() > 1e-4


def _broken(runner):
    """A block of the peer without its attention."""
    layers = getattr(runner.model, "layers", None)
    block = layers["0"] if isinstance(layers, torch.nn.ModuleDict) else layers[0]
    linear = getattr(getattr(block, "attention", None), "wo", None)
    linear = block.self_attn.o_proj if linear is None else linear
    return patch.object(linear, "forward", lambda x: torch.zeros_like(x))


def test_a_rehearsal_prints_ratios_and_draws_them(capsys, tmp_path):
    picture = tmp_path / "peers.png"
    command = [*SMALL, "--modes", "eager", "--json", "--out", str(picture)]
    assert bench_peers.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["modes"]["eager"]
    assert list(found["models"]) == list(peers.PEERS)
    assert len(found["ratios"]) == len(peers.RATIOS)
    for ratio in found["ratios"].values():
        for clock in peers.CLOCKS:
            assert 0 < ratio[clock]["low"] <= ratio[clock]["median"] <= ratio[clock]["high"]
    assert picture.stat().st_size > 1000
    table = peers.as_text(report["modes"]).splitlines()
    assert table[0].split() == ["eager", "wall", "ms", "CPU", "ms", "saved", "MiB"]
    assert [line.split()[0] for line in table if line.startswith("cola")] == [
        "cola",
        "cola/published",
        "cola/full",
    ]


def test_spread_is_the_quartiles():
    assert peers.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"low": 2.0, "median": 3.0, "high": 4.0}
    assert peers.spread([2.0]) == {"low": 2.0, "median": 2.0, "high": 2.0}


def test_saved_bytes_are_those_of_the_saved_tensors():
    """One product of a known size, whose input and weights are known."""
    runner = peers.Runner("full", WORKLOAD)
    runner.model = torch.nn.Sequential(torch.nn.Embedding(4096, 64), torch.nn.SiLU())
    assert runner.saved_bytes() == 16 * 64 * 4


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--steps", "0"], "--steps: got 0, expected at least 1"),
        (["--models", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(wrong, told, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_peers.main([*SMALL, *wrong])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and told in error and error.count("\n") == 1
