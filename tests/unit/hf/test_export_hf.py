# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The exported model code against the model that was trained, in fp64."""

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.run_folders import model_in
from tests.unit.hf.hf_models import CASES, exact, load, model_of
from tests.unit.tiny import build_tiny, max_error, tokens
from torchtitan_lr import hf
from torchtitan_lr.hf.export import HF_CODE, export_hf
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter, merge_factors

GENERATING = ["lax_gated", "lanes"]


@pytest.fixture(scope="module")
def exported(code_cache, tmp_path_factory):
    """Export a case once: our model, and the one that transformers loads."""
    done = {}

    def get(case):
        if case not in done:
            ours, folder = model_of(case), tmp_path_factory.mktemp("export") / case
            folder.mkdir()
            export_hf(ours.model_args, ours.state_dict(), folder, keep_factors=case == "svd")
            done[case] = ours, exact(load(folder), ours), folder
        return done[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_ours(exported, case):
    ours, theirs, folder = exported(case)
    assert type(theirs).__module__.startswith("transformers_modules.")
    ids = tokens(ours.model_args, s=24)
    expected = ours(ids)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    out = theirs.train()(ids, labels=ids)
    theirs.eval()
    assert max_error(out.logits, expected) < 1e-12
    assert max_error(out.loss, loss) < 1e-6  # transformers' loss is in fp32
    loss.backward()
    own = LlamaStateDictAdapter(ours.model_args, None, coded=True)
    wanted = own.to_hf({name: p.grad for name, p in ours.named_parameters()})
    theirs.zero_grad()
    theirs(ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in theirs.named_parameters()}
    assert found.keys() == wanted.keys()
    assert max(max_error(found[name], wanted[name]) for name in found) < 1e-6
    single = load(folder, torch.float32)
    with torch.no_grad():
        assert max_error(single(ids).logits, copy.deepcopy(ours).float()(ids)) < 1e-6


@pytest.mark.parametrize("case", GENERATING)
def test_cached_steps_are_the_whole_sequence(exported, case):
    ours, theirs, _ = exported(case)
    ids = tokens(ours.model_args, b=3, s=20)
    with torch.no_grad():
        cache, parts = None, []
        name = next(name for name in ("cache", "past_key_values") if name in theirs(ids))
        for piece in ids.split([7, 1, 4, 8], dim=1):  # a prompt, one token, a second turn
            out = theirs(piece, **{name: cache}, use_cache=True)
            cache = out[name]
            parts.append(out.logits)
        assert max_error(torch.cat(parts, dim=1), ours(ids)) < 1e-12


@pytest.mark.parametrize("case", GENERATING)
def test_batches_generate_what_each_prompt_would(exported, case):
    ours, theirs, _ = exported(case)
    mask = torch.arange(12) >= 12 - torch.tensor([12, 5, 1])[:, None]  # padded on the left
    rows = tokens(ours.model_args, b=3, s=12).masked_fill(~mask, 3)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 3}
    out = theirs.generate(rows, attention_mask=mask.long(), **options)
    for row, length in enumerate([12, 5, 1]):
        text = rows[row : row + 1, 12 - length :]
        for _ in range(8):
            with torch.no_grad():
                text = torch.cat((text, ours(text)[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(out[row, 12 - length :], text[0])
    static = {"cache_implementation": "static"}
    if case == "lax_gated":
        assert torch.equal(
            theirs.generate(rows, attention_mask=mask.long(), **options, **static), out
        )


def test_it_saves_itself_with_its_code(exported, tmp_path):
    ours, theirs, _ = exported("lanes")
    theirs.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / f"{HF_CODE}.py").is_file()
    ids, again = tokens(ours.model_args), exact(load(tmp_path / "again"), ours)
    with torch.no_grad():
        assert max_error(again(ids).logits, ours(ids)) < 1e-12
    assert type(again).__name__ == "TorchtitanLRForCausalLM"
    with torch.no_grad():  # this package reads it, too
        assert max_error(model_in(tmp_path / "again")(ids), ours(ids)) < 1e-12


def test_the_code_needs_torch_and_transformers_only():
    nodes = ast.walk(ast.parse((Path(hf.__path__[0]) / f"{HF_CODE}.py").read_text()))
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.append(node.module)
    roots = {name.split(".")[0] for name in names}
    assert roots <= {"__future__", "functools", "typing", "torch", "transformers"}


def test_merged_bf16_is_rounded_once():
    weights = build_tiny("svd").bfloat16().state_dict()
    name = "layers.0.attention.wq."
    merged = merge_factors(weights)[f"{name}weight"]
    exact = weights[f"{name}B.weight"].double() @ weights[f"{name}A.weight"].double()
    assert merged.dtype == torch.bfloat16
    # One rounding to bf16, of a sum of 12 products in fp32.
    sizes = weights[f"{name}B.weight"].double().abs() @ weights[f"{name}A.weight"].double().abs()
    assert ((merged.double() - exact).abs() <= 2**-8 * exact.abs() + 12 * 2**-23 * sizes).all()
