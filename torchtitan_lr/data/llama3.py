# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""llama-3's pre-tokenizer split, its special tokens, and tokenizer file names; needs no torch."""

HF_FILE = "tokenizer.json"
TIKTOKEN_FILE = "tokenizer.model"

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"

# llama-3's split of text before BPE: contractions, words with one leading non-letter, numbers of up
# to three digits, punctuation, line ends, spaces.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The named ones of llama-3.1's 256 special tokens, by position; all others are reserved.
_NAMED_SPECIALS = {
    0: BOS,
    1: EOS,
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
NUM_LLAMA3_SPECIALS = 256


def llama3_specials(first_id: int) -> dict[str, int]:
    """Return llama-3's special tokens and their ids.

    Args:
        first_id: The id after the last ordinary token.
    """
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(NUM_LLAMA3_SPECIALS))
    names = (_NAMED_SPECIALS.get(i) or next(reserved) for i in range(NUM_LLAMA3_SPECIALS))
    return {name: first_id + i for i, name in enumerate(names)}
