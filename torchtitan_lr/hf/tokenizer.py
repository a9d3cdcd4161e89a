# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a run's tokenizer so that transformers' AutoTokenizer gives the ids of training."""

import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from torchtitan_lr.data.tokenizer import HF_FILE
from torchtitan_lr.hf.shards import write_json
from torchtitan_lr.titan.base import BaseTokenizer, HuggingFaceTokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"

# What transformers would rebuild the tokenizer from, in its own way.
_REPLACED = ("add_bos_token", "add_eos_token", "added_tokens_decoder", "auto_map")


def export_tokenizer(tokenizer: BaseTokenizer, folder: Path, out_dir: Path, length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    The exported tokenizer puts BOS in front exactly where training did: for every text, if there
    is a BOS. It adds no EOS, unless the tokenizer does so by itself. Batches are padded on the
    left; padding is the EOS where the tokenizer has no token for it.

    Args:
        tokenizer: The run's tokenizer.
        folder: Where it came from; its chat template, if any, goes along.
        out_dir: An existing folder.
        length: Length of the sequences that the model was trained on.
    """
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    backend = Tokenizer.from_str(tokenizer.tokenizer.to_str())  # its own is in use
    given: dict[str, Any] = tokenizer.config or {}
    config = {name: value for name, value in given.items() if name not in _REPLACED}
    ids = {}  # of bos, eos and pad, as far as there are any
    for name in ("bos_token", "eos_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        number = None if token is None else backend.token_to_id(token)
        if number is not None:
            ids[f"{name}_id"] = number
    if not tokenizer.hf_adds_bos and "bos_token_id" in ids:
        _add_bos(backend, ids["bos_token_id"])
    if "pad_token_id" not in ids and "eos_token_id" in ids:
        ids["pad_token_id"] = ids["eos_token_id"]
        config["pad_token"] = config["eos_token"]
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "padding_side": "left",
        # Without token_type_ids, which LLaMA has no use for.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    backend.save(str(out_dir / HF_FILE))
    write_json(out_dir / TOKENIZER_CONFIG, config)
    write_json(out_dir / GENERATION_CONFIG, ids)
    if (folder / CHAT_TEMPLATE).is_file():
        shutil.copyfile(folder / CHAT_TEMPLATE, out_dir / CHAT_TEMPLATE)


def _add_bos(backend: Tokenizer, bos_id: int) -> None:
    """Let a tokenizer put BOS in front of every text."""
    bos = backend.id_to_token(bos_id)
    template = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    before = backend.post_processor
    backend.post_processor = processors.Sequence([before, template]) if before else template
