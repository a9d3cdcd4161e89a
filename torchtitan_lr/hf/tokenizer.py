# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a run's tokenizer so that transformers' AutoTokenizer gives the ids of training."""

import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from torchtitan_lr.data.llama3 import BOS, EOS, HF_FILE, LLAMA3_SPLIT, llama3_specials
from torchtitan_lr.data.tokenizer import TiktokenTokenizer
from torchtitan_lr.data.train_tokenizer import byte_alphabet
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
    config: dict[str, Any]
    if isinstance(tokenizer, TiktokenTokenizer):
        backend, adds_bos = _from_tiktoken(tokenizer), False
        # Names of special tokens in a text are text to it.
        config = {"bos_token": BOS, "eos_token": EOS, "split_special_tokens": True}
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        backend = Tokenizer.from_str(tokenizer.tokenizer.to_str())  # its own is in use
        config = {k: v for k, v in (tokenizer.config or {}).items() if k not in _REPLACED}
        adds_bos = tokenizer.hf_adds_bos
    ids = {}  # of bos, eos and pad, as far as there are any
    for name in ("bos_token", "eos_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        number = None if token is None else backend.token_to_id(token)
        if number is not None:
            ids[f"{name}_id"] = number
    if not adds_bos and "bos_token_id" in ids:
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


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> Tokenizer:
    """Convert a rank file: every pair of tokens that makes a third one is a merge of its rank."""
    chars = byte_alphabet()
    ranks = tokenizer.get_ranks()
    vocab = {"".join(chars[b] for b in token): rank for token, rank in ranks.items()}
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in vocab and b in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    # tiktoken takes a whole piece that is a token as it is, whatever merges would make of it.
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    specials = sorted(llama3_specials(len(ranks)).items(), key=lambda item: item[1])
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name, _ in specials]
    )
    return backend
