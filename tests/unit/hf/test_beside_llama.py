# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An export with code beside transformers' own LLaMA of the same weights."""

import pytest
import torch

from tests.commands import ROOT
from tests.support.run_folders import export, write_run
from tests.unit.hf.hf_models import load, model_of
from torchtitan_lr.hf.export import export_hf

IDS = torch.arange(24).view(2, 12) * 7 % 90
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[1, :4] = 0
EARLIER = torch.tril(torch.ones(12, 12, dtype=torch.bool))[None, None]
PACKED = {"position_ids": torch.cat((torch.arange(5), torch.arange(7)))[None], "use_cache": False}


def embedded(model):
    return {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(IDS)}


def after_seven(model):
    """The last five tokens behind a cache of the others."""
    with torch.no_grad():
        out = model(IDS[:, :7])
    name = next(name for name in ("cache", "past_key_values") if name in out)
    return {"input_ids": IDS[:, 7:], name: out[name]}


GIVEN = {
    "`attention_mask` (b, s) with padding": {"attention_mask": PADDED},
    "`attention_mask` (b, 1, s, s) of bool": {"attention_mask": EARLIER.expand(2, 1, 12, 12)},
    "`position_ids` that restart, with `use_cache=False`": PACKED,
    "`inputs_embeds`": embedded,
    "`inputs_embeds` and `input_ids`": lambda model: embedded(model) | {"input_ids": IDS},
    "a cache of earlier tokens": after_seven,
    "`labels` and `num_items_in_batch`": {"labels": IDS, "num_items_in_batch": 3},
    "`labels` and `shift_labels`": {"labels": IDS, "shift_labels": IDS.roll(-1, 1)},
    "`logits_to_keep`, a number": {"logits_to_keep": 2},
    "`logits_to_keep`, a tensor": {"logits_to_keep": torch.tensor([0, 3])},
    "`output_hidden_states`": {"output_hidden_states": True},
    '`output_attentions` with `attn_implementation="eager"`': {"output_attentions": True},
    "`return_dict=False`": {"return_dict": False},
    "`is_causal=False`": {"is_causal": False},
    "another keyword": {"nonsense": 1},
}


def answer(model, given):
    """What comes back: its names, and the tensors."""
    given = given(model) if callable(given) else given
    model.set_attn_implementation("eager" if "output_attentions" in given else "sdpa")
    try:
        with torch.no_grad():
            out = model(**({"input_ids": IDS} | given))
    except (TypeError, ValueError) as error:
        return [type(error).__name__], []
    if isinstance(out, tuple):
        return ["a tuple"], [out[0]]
    kept = {name: out[name] for name in out if name not in ("cache", "past_key_values")}
    parts = [part if isinstance(part, tuple) else (part,) for part in kept.values()]
    return [*kept], [tensor for part in parts for tensor in part]


@pytest.fixture(scope="module")
def both(code_cache, tmp_path_factory):
    """LlamaForCausalLM, and TorchtitanLRForCausalLM with the factors of its weights."""
    ours, loaded = model_of("svd"), []
    for name in ("dense", "factors"):
        folder = tmp_path_factory.mktemp("beside") / name
        folder.mkdir()
        export_hf(ours.model_args, ours.state_dict(), folder, keep_factors=name == "factors")
        loaded.append(load(folder))
        loaded[-1].folder = folder
    assert [type(m).__name__ for m in loaded] == ["LlamaForCausalLM", "TorchtitanLRForCausalLM"]
    return loaded


@pytest.mark.parametrize("case", ["svd", "lax_gated", "lanes"])
def test_texts_in_one_row_do_not_see_each_other(case, code_cache, tmp_path):
    ours = model_of(case)
    export_hf(ours.model_args, ours.state_dict(), tmp_path, keep_factors=case == "svd")
    model = load(tmp_path)
    with torch.no_grad():
        alone = torch.cat([model(IDS[:1, :5]).logits, model(IDS[:1, 5:]).logits], dim=1)
        packed = model(IDS[:1], **PACKED).logits
        together = model(IDS[:1], use_cache=False).logits  # the control
    torch.testing.assert_close(packed, alone)
    assert (together - alone).abs().max() > 1e-3


def test_without_its_code_it_is_refused_and_not_drawn_anew(both):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    for loader in (AutoModelForCausalLM, LlamaForCausalLM):
        with pytest.raises(KeyError, match="load with trust_remote_code=True"):
            loader.from_pretrained(both[1].folder)


def test_it_takes_what_llama_takes(both):
    page = (ROOT / "docs/use_a_model.md").read_text()
    for label, given in GIVEN.items():
        assert f"| {label} |" in page
        (wanted, theirs), (found, ours) = (answer(model, given) for model in both)
        assert found == wanted and len(ours) == len(theirs), label
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for model in both:
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(IDS, nonsense=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_token_added_later_is_generated(code_cache, tmp_path):
    from transformers import AutoTokenizer

    step, _ = write_run(tmp_path / "run", "cola", vocab_size=8192)  # the tokenizer has 4096
    assert export.main([str(step), str(tmp_path / "out")]) == 0
    model = load(tmp_path / "out", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")  # asks for no trust: it has no code
    tokenizer.add_tokens(["<answer>"])
    added = tokenizer.convert_tokens_to_ids("<answer>")
    prompt = tokenizer("import os", return_tensors="pt")
    with torch.no_grad():
        out = model(**prompt, output_hidden_states=True).hidden_states[-1][0, -1]
        model.get_output_embeddings().weight[added] = 100 * out
    text = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(text[0]).endswith("<answer>")
