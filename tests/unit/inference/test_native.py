# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The step of the library against the model that reads the whole sequence again."""

import pytest
import torch

from tests.unit.inference.test_decode import (
    CASES,
    GREEDY,
    MODELS,
    build,
    decode,
    prompts_of,
    uncached,
)
from tests.unit.tiny import build_tiny
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.decode import Decoder
from torchtitan_lr.inference.native import build as library
from torchtitan_lr.inference.native.program import NativeModel
from torchtitan_lr.inference.sampling import Sampling
from torchtitan_lr.inference.screened_head import ScreenedHead, screen_head

MODELS["cola_wide"] = ("cola", {"dim": 64, "rank_attention": 36})  # heads of a whole panel
MODELS["cola_reduced"] = ("cola", {"activation": "reduced"})


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def natively(model, prompts, limits, kind="full", sampling=GREEDY, seeds=None):
    rows = len(prompts)
    native = NativeModel(model)
    seeds = seeds or [0] * rows
    return decode(Decoder(model, prompts, limits, sampling, seeds, cache=kind, native=native))


LENGTHS = (3, 9, 6, 4, 5, 9, 7, 8, 3, 4, 5, 6)
"""Eight rows are a tile, three another, and one the rest."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [case for case in CASES if "lanes" not in case[0]]
    + [(f"cola_{which}", "latent") for which in ("reduced", "wide")],
)
def test_tokens_are_those_of_the_whole_sequence(name, kind):
    model = build(name)
    limits = [6, 4] * 6
    prompts = prompts_of(model, LENGTHS)
    rows = natively(model, prompts, limits, kind)
    assert rows == [uncached(model, p, n) for p, n in zip(prompts, limits, strict=True)]
    assert len({token for row in rows for token in row}) > 5


@pytest.mark.parametrize("kind", ["full", "latent"])
def test_threads_and_screen_change_no_token(kind, two_threads):
    model = build("cola_gqa")
    prompts, limits = prompts_of(model, LENGTHS), [8] * 12
    rows = decode(Decoder(model, prompts, limits, GREEDY, [0] * 12, cache=kind))
    assert natively(model, prompts, limits, kind) == rows
    screen_head(model)
    assert natively(model, prompts, limits, kind) == rows
    assert natively(model, prompts[:1], limits[:1], kind) == rows[:1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("full_gqa", "full"), ("lax_gated", "full"), ("lax_gated", "latent"), ("cola", "latent")],
)
def test_hidden_states_are_those_of_torch(name, kind):
    model = build(name)
    prompts = prompts_of(model)
    sampling = Sampling(1.0, top_k=7)
    logits = {}
    for native in (None, NativeModel(model)):
        seen = logits.setdefault(native is None, [])

        def choice(sampling, found, uniform, seen=seen):
            seen.append(found.clone())
            return sampling.choose(found[:, -1], uniform)

        decode(
            Decoder(model, prompts, [8] * 3, sampling, [5, 6, 7], (), kind, False, choice, native)
        )
    torch.testing.assert_close(logits[False], logits[True], atol=1e-10, rtol=0)
    assert (logits[True][1] - logits[True][2]).abs().max() > 1e-3


def test_screened_tokens_are_those_of_all_logits():
    generator = torch.Generator().manual_seed(0)
    model = build_tiny("cola", torch.float32, vocab_size=4001).eval()
    with torch.no_grad():
        model.output.weight.copy_(torch.randn(4001, 48, generator=generator))
    # Two whole vectors of rows and a part of one.
    prompts, limits = prompts_of(model, [4] * 37), [12] * 37
    rows = natively(model, prompts, limits)
    assert rows == decode(Decoder(model, prompts, limits, GREEDY, [0] * 37))
    screen_head(model)
    assert natively(model, prompts, limits) == rows
    # The control: without the bounds' width, the largest estimate would win.
    head = model.output.head
    assert isinstance(head, ScreenedHead)
    head.weight_error.zero_()
    head.code_norm.zero_()
    head.scale.mul_(1 + 0.1 * torch.rand(4001, generator=generator))
    assert natively(model, prompts, limits) != rows


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda model: model.to(torch.bfloat16), "--native: got 'torch.bfloat16', expected"),
        (lambda model: model.to("meta"), "--native: got 'meta', expected --device cpu"),
        (lambda model: build("full_lanes"), "--native: got 'LaneColumnEdge'"),
    ],
)
def test_other_models_are_refused(change, part):
    with pytest.raises(ConfigError, match=part):
        NativeModel(change(build_tiny("full")))


def test_a_missing_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, part in (("no-such-compiler", "No such file"), ("false", "C\\+\\+17")):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(ConfigError, match=f"--native: got '{compiler}', expected .*{part}"):
            library.load_library.__wrapped__()
