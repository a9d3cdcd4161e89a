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


PACKED = {"position_ids": torch.cat((torch.arange(5), torch.arange(7)))[None], "use_cache": False}


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
