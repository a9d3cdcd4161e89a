# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An export with code beside transformers' own LLaMA of the same weights."""

import pytest
import torch

from tests.unit.hf.hf_models import CASES, model_of
from torchtitan_lr.hf.export import export_hf

IDS = torch.arange(24).view(2, 12) * 7 % 90


@pytest.fixture(scope="module")
def both(code_cache, tmp_path_factory):
    """LlamaForCausalLM, and TorchtitanLRForCausalLM with the factors of its weights."""
    from transformers import AutoModelForCausalLM

    ours, loaded = model_of("svd"), []
    for name in ("dense", "factors"):
        folder = tmp_path_factory.mktemp("beside") / name
        folder.mkdir()
        export_hf(ours.model_args, ours.state_dict(), folder, keep_factors=name == "factors")
        options = {"trust_remote_code": True, "torch_dtype": torch.float64}
        loaded.append(AutoModelForCausalLM.from_pretrained(folder, **options).eval())
        loaded[-1].folder = folder
    assert [type(m).__name__ for m in loaded] == ["LlamaForCausalLM", "TorchtitanLRForCausalLM"]
    return loaded


def embedded(model):
    return {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(IDS)}


def after_seven(model):
    """The last five tokens behind a cache of the others."""
    with torch.no_grad():
        out = model(IDS[:, :7])
    name = next(name for name in ("cache", "past_key_values") if name in out)
    return {"input_ids": IDS[:, 7:], name: out[name]}


PACKED = {"position_ids": torch.cat((torch.arange(5), torch.arange(7)))[None], "use_cache": False}
PADDED = torch.ones_like(IDS).index_fill_(1, torch.arange(3), 0)
GIVEN = {
    "`attention_mask` (b, s)": {"attention_mask": PADDED},
    "`position_ids` that restart, with `use_cache=False`": PACKED,
    "`inputs_embeds`": embedded,
    "a cache of earlier tokens": after_seven,
    "`labels`": {"labels": IDS},
    "`logits_to_keep`, a number": {"logits_to_keep": 2},
    "`output_hidden_states`": {"output_hidden_states": True},
    '`output_attentions` with `attn_implementation="eager"`': {"output_attentions": True},
    "another keyword": {"nonsense": 1},
}


def answer(model, given):
    """What comes back: its name, and the tensors."""
    given = given(model) if callable(given) else given
    model.set_attn_implementation("eager" if "output_attentions" in given else "sdpa")
    usual = {"input_ids": IDS}
    try:
        with torch.no_grad():
            plain, out = model(IDS), model(**(usual | given))
    except (TypeError, ValueError) as error:
        return f"refused ({type(error).__name__})", []
    if isinstance(out, tuple):
        return "a tuple", [out[0]]
    kept = {name: out[name] for name in out if name not in ("cache", "past_key_values", "logits")}
    name = f"logits {list(out.logits.shape)}"
    if out.logits.shape == plain.logits.shape:
        name = "other logits"
        if torch.allclose(out.logits, plain.logits):
            name = "the same logits"
    tensors = [out.logits, *kept.values()]
    flat = [t for part in tensors for t in (part if isinstance(part, tuple) else [part])]
    return ", ".join([name, *(f"`{key}`" for key in kept)]), flat


def test_it_takes_what_llama_takes(both):
    for label, given in GIVEN.items():
        (wanted, theirs), (found, ours) = (answer(model, given) for model in both)
        assert found == wanted and len(ours) == len(theirs), label
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for model in both:
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(IDS, nonsense=1)


@pytest.mark.parametrize("case", CASES)
def test_texts_in_one_row_do_not_see_each_other(case, code_cache, tmp_path):
    from transformers import AutoModelForCausalLM

    ours = model_of(case)
    export_hf(ours.model_args, ours.state_dict(), tmp_path, keep_factors=case == "svd")
    options = {"trust_remote_code": True, "torch_dtype": torch.float64}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
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
