# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Cached decoding against the model that reads the whole sequence again for every token."""

import pytest
import torch

from tests.unit.tiny import FAMILIES, build_tiny, tokens
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.cache import KeyValueCache
from torchtitan_lr.inference.decode import Decoder, Sampling, compile_blocks

GREEDY = Sampling(temperature=0)
LANES = {"lanes": 2, "sync_fraction": 0.5}
GQA = {"n_kv_heads": 2}
MODELS = {name: (name, {}) for name in FAMILIES}
MODELS |= {f"{name}_gqa": (name, GQA) for name in ("full", "cola", "lax")}
MODELS["full_lanes"] = ("full", LANES | GQA)
MODELS["lax_gated"] = ("lax", {"lax_gate": "scalar"})


def build(name):
    family, changes = MODELS[name]
    model = build_tiny(family, torch.float64, **changes).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("gate"):
                parameter.fill_(0.7)
            elif ".w" in key:
                parameter.mul_(6)  # initial weights hardly look at earlier tokens
    return model


def prompts_of(model, lengths=(3, 9, 6)):
    ids = tokens(model.model_args, b=len(lengths), s=max(lengths))
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


@torch.no_grad()
def uncached(model, prompt, new, unknown=()):
    """The most likely continuation, one sequence at a time, without a cache."""
    row = list(prompt)
    for _ in range(new):
        best_first = model(torch.tensor([row]))[0, -1].argsort(descending=True).tolist()
        row.append(next(token for token in best_first if token not in unknown))
    return row[len(prompt) :]


def decode(decoder):
    rows = [[] for _ in decoder.running]
    while any(decoder.running):
        for row, token in zip(rows, decoder.step(), strict=True):
            if token is not None:
                row.append(token)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_a_cache(name):
    model = build(name)
    prompts = prompts_of(model)
    limits = [12, 9, 14]
    decoder = Decoder(model, prompts, limits, GREEDY, [0] * 3)
    rows = decode(decoder)
    expected = [uncached(model, p, n) for p, n in zip(prompts, limits, strict=True)]
    assert rows == expected
    assert len({token for row in rows for token in row}) > 5  # no model that repeats one token
    assert decoder.new_tokens == limits


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, top_k=2)])
def test_tokens_that_the_tokenizer_lacks_are_never_drawn(sampling):
    model = build("cola")
    prompts = prompts_of(model)
    free = decode(Decoder(model, prompts, [12] * 3, sampling, [0, 1, 2]))
    unknown = sorted({token for row in free for token in row})
    rows = decode(Decoder(model, prompts, [12] * 3, sampling, [0, 1, 2], unknown=unknown))
    assert not {token for row in rows for token in row} & {*unknown}
    if sampling == GREEDY:
        assert rows == [uncached(model, prompt, 12, unknown) for prompt in prompts]


@torch.no_grad()
def forced(model, rows, lengths, claimed=None):
    """Logits after each token of given sequences: prefill up to ``lengths``, then one by one."""
    width, new = max(lengths), len(rows[0]) - lengths[0]
    cache = KeyValueCache(claimed or lengths, width + new, model.model_args.n_layers)
    padded = [[0] * (width - n) + row[:n] for row, n in zip(rows, lengths, strict=True)]
    steps = [torch.tensor(padded)]
    steps += [
        torch.tensor([[row[n + i]] for row, n in zip(rows, lengths, strict=True)])
        for i in range(new)
    ]
    return torch.cat([model(step, cache=cache) for step in steps], dim=1)


def test_logits_are_those_without_a_cache():
    model = build("cola_gqa")
    lengths, new = (4, 10, 7), 6
    rows = prompts_of(model, [n + new for n in lengths])
    found = forced(model, rows, lengths)
    with torch.no_grad():
        whole = [model(torch.tensor([row]))[0, -new - 1 :] for row in rows]
    torch.testing.assert_close(found, torch.stack(whole), atol=1e-12, rtol=0)
    # The control: padding that is read as text changes the predictions of the short rows.
    wrong = forced(model, rows, lengths, claimed=(10, 10, 10))
    assert (wrong[1] - found[1]).abs().max() < 1e-12
    assert (wrong[0] - found[0]).abs().max() > 1e-3


def test_a_prompt_may_be_read_in_parts():
    model = build("cola_gqa")
    ids = tokens(model.model_args, b=2, s=12)
    with torch.no_grad():
        expected = model(ids)[:, -1:]
        cache = KeyValueCache([12, 12], 12, 3)
        logits = [model(part, cache=cache) for part in ids.split((5, 4, 3), dim=1)]
    torch.testing.assert_close(logits[-1], expected, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="12 columns, not 13"):
        cache.begin(model.freqs_cis, 1)


@pytest.mark.parametrize("name", ["cola", "cola_gqa", "full_lanes"])
def test_bytes_of_the_caches(name):
    model = build(name)
    args = model.model_args
    decoder = Decoder(model, prompts_of(model), [5, 5, 5], GREEDY, [0] * 3)
    decoder.step()
    columns = 9 + 5 - 1
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in decoder.cache.layers)
    assert held == 8 * args.n_layers * 3 * columns * 2 * args.kv_dim


def test_draws_of_a_row_do_not_depend_on_the_batch():
    model = build("cola")
    prompts, sampling = prompts_of(model), Sampling(1.0, top_k=40, top_p=0.95)
    together = decode(Decoder(model, prompts, [10] * 3, sampling, [5, 6, 7]))
    alone = [
        decode(Decoder(model, [prompt], [10], sampling, [seed]))[0]
        for prompt, seed in zip(prompts, (5, 6, 7), strict=True)
    ]
    assert together == alone
    assert decode(Decoder(model, prompts, [10] * 3, sampling, [8, 9, 10])) != alone


def test_a_stopped_row_leaves_the_others_alone():
    model = build("svd")
    prompts = prompts_of(model)
    free = decode(Decoder(model, prompts, [10] * 3, GREEDY, [0] * 3))
    decoder = Decoder(model, prompts, [10] * 3, GREEDY, [0] * 3)
    for _ in range(4):
        decoder.step()
    decoder.running[1] = False
    assert decoder.step()[1] is None
    while any(decoder.running):
        last = decoder.step()
    assert last == [free[0][-1], None, free[2][-1]]
    assert decoder.new_tokens == [10, 4, 10]


@pytest.mark.parametrize(("name", "rows"), [("cola_gqa", 3), ("cola_gqa", 1), ("full", 1)])
def test_a_step_of_fixed_shapes_is_one_graph(name, rows):
    """The graph has all of a block (`fullgraph`); padded rows and masked columns change nothing."""
    torch.compiler.reset()  # shapes of other tests would make this one's symbolic
    model = build(name)
    prompts = prompts_of(model)[:rows]
    expected = decode(Decoder(model, prompts, [8] * rows, GREEDY, [0] * rows))
    seen = []
    compile_blocks(model, lambda graph, inputs: seen.append(graph) or graph)
    compiled = Decoder(model, prompts, [8] * rows, GREEDY, [0] * rows, compiled=True)
    assert decode(compiled) == expected
    assert len(seen) == 2  # for every block and step, and for the head


@pytest.mark.parametrize(
    ("prompt", "new", "part"),
    [
        (0, 5, "--prompt: got '0 tokens', expected from 1 to 32 tokens"),
        (33, 1, "--prompt: got '33 tokens', expected from 1 to 32 tokens"),
        (30, 4, "--max_new_tokens: got 4, expected from 1 to 3 after a prompt of 30 tokens"),
        (5, 0, "--max_new_tokens: got 0, expected from 1 to 28"),
    ],
)
def test_windows_beyond_the_trained_length_are_refused(prompt, new, part):
    model = build_tiny("cola")
    with pytest.raises(ConfigError, match=part):
        Decoder(model, [[1, 2], [3] * prompt], [1, new], GREEDY, [0, 0])
