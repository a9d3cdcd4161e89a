# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tokenizers that come with a model and go along with it: all their files, in and out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from torchtitan_lr.config.files import file_within, read_json, read_regular
from torchtitan_lr.data.pairs import template_files
from torchtitan_lr.data.tokenizer import (
    GENERATION_CONFIG,
    HF_FILE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    Tokenizer,
    stop_ids_of,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.export import write_json

_FILES = (HF_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "added_tokens.json", GENERATION_CONFIG)

# What transformers would rebuild the tokenizer from, in its own way.
_REPLACED = ("add_bos_token", "add_eos_token", "auto_map")


def import_tokenizer(folder: Path, model: Path, out_dir: Path) -> None:
    """Copy a tokenizer's files; what ends a text is said by its folder, else by its model's.

    A ConfigError says that a file is a link to a place outside of the folder, or cannot be read.
    """
    there = [name for name in _FILES if (folder / name).is_file()]
    copy_files(folder, [*there, *template_files(folder).values()], out_dir)
    if GENERATION_CONFIG in there:
        return
    if (model / GENERATION_CONFIG).is_file():
        copy_files(model, [GENERATION_CONFIG], out_dir)
    elif stop_ids_of(model):  # transformers reads them from there, too
        given = read_json(model / "config.json")
        ids = {name: given.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        values = {name: value for name, value in ids.items() if value is not None}
        write_json(out_dir / GENERATION_CONFIG, values)


def copy_files(folder: Path, names: Iterable[str], out_dir: Path) -> None:
    """Copy files of a folder, byte by byte; errors as for `import_tokenizer`."""
    for name in names:
        try:
            content = read_regular(file_within(folder, name))
        except OSError as error:
            want = f"a file that can be copied ({error.strerror})"
            raise ConfigError("model.hf_assets_path", str(folder / name), want) from error
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (out_dir / name).write_bytes(content)


def export_tokenizer(
    tokenizer: Tokenizer, folder: Path, out_dir: Path, length: int
) -> dict[str, Any]:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    The exported tokenizer puts BOS in front where training did. It adds no EOS, unless the
    tokenizer does so by itself. Padding, on the left, is the EOS where there is no token for it.
    Returns the ids of the special tokens, by their names in ``config.json``; errors as for
    `import_tokenizer`.
    """
    backend = Backend.from_str(tokenizer.tokenizer.to_str())  # its own is in use
    given = {name: value for name, value in tokenizer.config.items() if name not in _REPLACED}
    named = {name: given.get(name) or text for name, text in tokenizer.special_tokens.items()}
    config: dict[str, Any] = given | named
    if tokenizer.more_special_tokens and not given.get("extra_special_tokens"):
        config["additional_special_tokens"] = tokenizer.more_special_tokens
    ids: dict[str, Any] = {}  # of bos, eos and pad, as far as there are any
    for name in ("bos_token", "eos_token", "pad_token"):
        token = tokenizer.special_tokens.get(name)
        number = None if token is None else backend.token_to_id(token)
        if number is not None:
            ids[f"{name}_id"] = number
    bos = ids.get("bos_token_id")
    if bos is not None and bos not in tokenizer.added[0]:
        _add_bos(backend, bos)
    if "pad_token_id" not in ids and "eos_token_id" in ids:
        ids["pad_token_id"] = ids["eos_token_id"]
        config["pad_token"] = config["eos_token"]
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "padding_side": "left",
        # Without token_type_ids, which LLaMA has no use for.
        "model_input_names": ["input_ids", "attention_mask"],
        # The setting would remove spaces of the text itself.
        "clean_up_tokenization_spaces": False,
    }
    stops = stop_ids_of(folder)
    if len(stops) > 1:
        ids["eos_token_id"] = stops
    backend.save(str(out_dir / HF_FILE))
    write_json(out_dir / TOKENIZER_CONFIG, config)
    copy_files(folder, template_files(folder).values(), out_dir)
    if (folder / GENERATION_CONFIG).is_file():
        copy_files(folder, [GENERATION_CONFIG], out_dir)
        return ids | {k: v for k, v in read_json(out_dir / GENERATION_CONFIG).items() if k in ids}
    write_json(out_dir / GENERATION_CONFIG, ids)
    return ids


def _add_bos(backend: Backend, bos_id: int) -> None:
    """Let a tokenizer put BOS in front of every text."""
    bos = backend.id_to_token(bos_id)
    template = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    before = backend.post_processor
    backend.post_processor = processors.Sequence([before, template]) if before else template
