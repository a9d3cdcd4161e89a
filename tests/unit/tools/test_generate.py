# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import json

import pytest
import torch

from tests.scripts import load_script
from tests.unit.tiny import FAMILIES, build_tiny, tokens
from tests.unit.tools.test_export import run_record, write_run
from torchtitan_lr.tools.generate import generate, sample

script = load_script("generate")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_argmax_of_the_whole_sequence(family):
    model = build_tiny(family, torch.float64)  # no two logits are equal up to rounding
    prompt = tokens(model.model_args, b=1, s=5)
    out = generate(model, prompt, 8, temperature=0)
    assert out.shape == (1, 13)
    assert torch.equal(out[:, :5], prompt)
    with torch.no_grad():
        predicted = model(out).argmax(-1)
    assert torch.equal(out[0, 5:], predicted[0, 4:-1])


def test_sampling_follows_the_seed():
    model = build_tiny("cola")
    prompt = tokens(model.model_args, b=1, s=5)
    one, again, other = (generate(model, prompt, 20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_generation_goes_beyond_the_rotary_table():
    model = build_tiny("cola", torch.float64)
    prompt = tokens(model.model_args, b=1, s=30)
    out = generate(model, prompt, 10, temperature=0)
    assert out.shape == (1, 40)
    with torch.no_grad():
        assert out[0, -1] == model(out[:, -33:-1])[0, -1].argmax()


def test_a_stop_token_ends_the_text():
    model = build_tiny("cola")
    prompt = tokens(model.model_args, b=1, s=5)
    free = generate(model, prompt, 20, seed=4)
    stop = free[0, 9].item()
    first = free[0, 5:].tolist().index(stop)
    assert torch.equal(generate(model, prompt, 20, seed=4, stop_id=stop), free[:, : 6 + first])


def test_top_k_and_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)

    def frequencies(temperature, top_k):
        drawn = sample(logits, temperature, top_k, generator).flatten()
        return drawn.bincount(minlength=4) / len(drawn)

    top_two = frequencies(1.0, 2)
    assert (top_two[:2] == 0).all()
    expected = logits[0, 2:].softmax(-1)
    torch.testing.assert_close(top_two[2:], expected, atol=0.03, rtol=0)
    every = frequencies(2.0, 0)
    torch.testing.assert_close(every, (logits[0] / 2).softmax(-1), atol=0.03, rtol=0)
    assert not torch.allclose(every, logits[0].softmax(-1), atol=0.03)
    assert frequencies(0, 0).tolist() == [0, 0, 0, 1]


def command(capsys, *argv):
    try:
        status = script.main([str(a) for a in argv])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def test_the_command_continues_the_prompt(tmp_path, capsys):
    step, _ = write_run(tmp_path, "cola")
    options = ("--checkpoint", step, "--prompt", "import os", "--max_new_tokens", 5)
    status, out, _ = command(capsys, *options, "--device", "cpu")
    assert status == 0
    assert out.startswith("import os")
    assert len(out.strip()) > len("import os")
    assert command(capsys, *options, "--device", "cpu")[1] == out
    # The checkpoint as the first argument, and data instead of the text alone.
    said = command(capsys, *options[1:], "--device", "cpu", "--json")[1]
    assert json.loads(said) == {"prompt": "import os", "text": out.removesuffix("\n")}
    assert command(capsys, *options, "--device", "cpu", "--seed", 1)[1] != out


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--max_new_tokens", "0"], "--max_new_tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top_k", "-1"], "--top_k"),
        (["--top_k", "9" * 30], "--top_k"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "9" * 30], "--seed"),
        (["--prompt", "bytes \udcff that are no UTF-8"], "--prompt"),
        (["--device", "abacus"], "--device"),
        (["--checkpoint", "nowhere/a/b"], "CHECKPOINT"),
        (["--beams", "4"], "--beams"),
    ],
)
def test_refusals(tmp_path, capsys, options, key):
    step, _ = write_run(tmp_path, "cola")
    status, out, err = command(capsys, "--checkpoint", step, "--prompt", "a", *options)
    assert (status, out) == (2, "")
    assert key in err
    assert err.count("\n") == 1, err


def test_a_tokenizer_that_is_missing_or_too_large_is_refused(tmp_path, capsys):
    step, _ = write_run(tmp_path, "cola")
    record = run_record("cola")
    for assets in ("nowhere", str(tmp_path / "large")):
        record["model"]["hf_assets_path"] = assets
        (tmp_path / "job_config.json").write_text(json.dumps(record))
        if assets != "nowhere":
            write_large_tokenizer(tmp_path / "large")
        status, _, err = command(capsys, "--checkpoint", step, "--prompt", "a")
        assert status == 2
        assert err.startswith("error: model.hf_assets_path: got")
        assert err.count("\n") == 1


def write_large_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir()
    vocabulary = {f"t{i}": i for i in range(5000)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
