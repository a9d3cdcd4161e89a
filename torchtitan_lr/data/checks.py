# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of a run's corpora before any rank starts: they exist, are text, and are long enough."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.data.blocks import Corpus
from torchtitan_lr.data.chat_template import TEMPLATE_FILE, ChatTemplate
from torchtitan_lr.data.corpora import (
    Source,
    check_name,
    is_hub,
    training_source,
    validation_source,
)
from torchtitan_lr.data.documents import DocumentBorders
from torchtitan_lr.data.local_corpus import LocalCorpus
from torchtitan_lr.data.mixture import MixtureSource
from torchtitan_lr.data.pair_corpora import PairCorpus
from torchtitan_lr.data.pairs import PairEncoder, has_labels, no_room
from torchtitan_lr.data.tokenizer import resolve_assets_path
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import logger

PAIRS_CHECKED = 200
"""Pairs of a corpus that are encoded before a run, to say how many are cut."""

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import BaseTokenizer


def check_corpus(job_config: Any) -> None:
    """Check that the corpora exist, without network access and without reading all the text.

    Args:
        job_config: The run's ``JobConfig``; sections ``training`` and ``validation`` are read.

    Raises:
        ConfigError: An unknown name, a missing or empty corpus, a pattern without a match, an
            unsupported loader setting, or validation on the training files.
        DataError: The first records cannot be read.
    """
    training, validation = job_config.training, job_config.validation
    check_workers(training.dataloader, "training")
    source = training_source(job_config)
    parts = source.parts if isinstance(source, MixtureSource) else (source,)
    opened = []
    for part in parts:
        check_name(part.name, part.path, "training")
        opened.append(_check_text(part, part.name))
    if not validation.enable:
        return
    check_workers(validation.dataloader, "validation")
    _check_streamed_validation(parts, validation)
    check_name(validation.dataset, validation.dataset_path, "validation")
    source = validation_source(job_config)
    if isinstance(source, MixtureSource):
        for part in source.parts:
            _check_text(part, validation.dataset)
        return
    if source.key == "validation":
        for part, trained in zip(parts, opened, strict=True):
            _check_other_text(source, trained, part.name)
    _check_text(source, validation.dataset)


def check_sequences(job_config: Any, tokenizer: BaseTokenizer) -> None:
    """Check that each corpus fills one sequence; call it after :func:`check_corpus`.

    Only enough text for one sequence is tokenised. Hub streams are assumed to be long enough. Of
    pairs, some are encoded, and a warning says how many are cut or have no room for an answer.

    Raises:
        ConfigError: A corpus has fewer tokens than one sequence, or pairs without room for an
            answer; the tokenizer cannot separate documents; or a chat template cannot be used.
        DataError: One of the records read for the check is unreadable.
    """
    DocumentBorders.of(job_config, tokenizer)
    sections = [("training", job_config.training, training_source(job_config))]
    if job_config.validation.enable:
        source = validation_source(job_config)
        sections.append(("validation", job_config.validation, source))
    for key, section, source in sections:
        if any(map(is_hub, _names(source))):
            continue
        wanted, found = section.seq_len + 1, 0
        corpus = source.open()
        if isinstance(corpus, PairCorpus):
            if getattr(job_config.training, "mask_documents", False):
                want = "false for a corpus of pairs, each of which has a row of its own"
                raise ConfigError("training.mask_documents", True, want)
            _check_pairs(corpus, tokenizer, section.seq_len, key, job_config.model.hf_assets_path)
            continue
        for text in corpus:
            found += _count_tokens(text, tokenizer, wanted - found)
            if found >= wanted:
                break
        else:
            part = "held-out part of the" if source.split == "validation" else "whole"
            want = f"at most {found - 1}: the {part} corpus {source.name!r} has {found} tokens"
            raise ConfigError(f"{key}.seq_len", section.seq_len, want)


def _check_pairs(
    corpus: PairCorpus, tokenizer: BaseTokenizer, seq_len: int, key: str, assets: str
) -> None:
    """Encode the first pairs; raise if no answer has room, log how many are cut or left out."""
    template = ChatTemplate.of(tokenizer)
    if not template.digest and getattr(tokenizer, "tokenizer_path", None) is None:
        path = resolve_assets_path(assets) / TEMPLATE_FILE
        if path.is_file():
            want = "a tokenizer.json beside it: a rank file has no special tokens in its text"
            raise ConfigError("model.hf_assets_path", str(path), want)
    encoder = PairEncoder(tokenizer)
    rows = [encoder.encode(record) for record in islice(corpus.records(), PAIRS_CHECKED)]
    usable = sum(has_labels(row[: seq_len + 1]) for row in rows)
    checked = f"the first {len(rows)} pairs of {corpus.name!r}"
    if not usable:
        raise no_room(seq_len, key, checked)
    long = sum(len(row) > seq_len + 1 for row in rows)
    if long:
        logger.warning(
            "%s.seq_len = %d: of %s, %d are longer and are cut; %d of them have no room for an "
            "answer and are left out",
            *(key, seq_len, checked, long, len(rows) - usable),
        )


def _names(source: Source | MixtureSource) -> list[str]:
    return [part.name for part in getattr(source, "parts", (source,))]


def _count_tokens(text: str, tokenizer: BaseTokenizer, wanted: int) -> int:
    """Count a document's tokens; for a long document the count may stop once it has ``wanted``."""
    beginning = text[: 16 * wanted]
    found = len(tokenizer.encode(beginning, add_bos=True, add_eos=True))
    if found >= wanted or len(beginning) == len(text):
        return found
    return len(tokenizer.encode(text, add_bos=True, add_eos=True))


def _check_text(source: Source, named: str) -> Corpus | None:
    """Check that a corpus has text, and return it; what may need a network is not opened (None)."""
    folder = source.name == "hf" and source.path and Path(source.path).exists()
    if is_hub(source.name) and not folder:
        return None
    corpus = source.open()
    if isinstance(corpus, LocalCorpus):
        corpus.check_encoding()
    if next(iter(corpus), None) is None:
        key, want = f"{source.key}.dataset", "a corpus with text in it"
        if source.split == "validation":
            want = "'local' with a separate file: the corpus is too small to hold out a part"
            key = "validation.dataset"
        raise ConfigError(key, named, want)
    return corpus


def _check_streamed_validation(parts: tuple[Source, ...], validation: Any) -> None:
    """Raise if validation would read a whole stream for its held-out documents."""
    if validation.dataset != "training" or validation.steps != -1:
        return
    for part in parts:
        if part.name == "hf" and part.options.hf_streaming and not part.options.hf_held_out:
            want = "a number of batches: held-out documents are spread over the whole stream"
            raise ConfigError("validation.steps", -1, f"{want} (or training.hf_held_out)")


def _check_other_text(source: Source, trained: Corpus | None, training: str) -> None:
    """Raise if the named validation corpus contains training files."""
    advice = "validation.dataset = 'training' takes what is held out from it"
    if source.name == "local" and isinstance(trained, LocalCorpus):
        corpus = source.open()
        assert isinstance(corpus, LocalCorpus)
        files = {path.resolve() for path in trained.paths}
        shared = [path for path in corpus.paths if path.resolve() in files]
        if shared:
            want = f"files that are not trained on ({shared[0]} is); {advice}"
            raise ConfigError("validation.dataset_path", source.path, want)
    if source.name == training == "c4_validation":
        want = "another corpus than training.dataset"
        raise ConfigError("validation.dataset", source.name, want)


def check_workers(dataloader: Any, key: str) -> None:
    """Raise if worker processes are configured: the training process tokenises all rows.

    Args:
        dataloader: The ``[training.dataloader]`` or ``[validation.dataloader]`` section.
        key: The TOML section that contains it.

    Raises:
        ConfigError: A worker setting differs from its default.
    """
    for name, idle in (
        ("num_workers", 0),
        ("persistent_workers", False),
        ("prefetch_factor", None),
    ):
        got = getattr(dataloader, name)
        if got != idle:
            want = "no value" if idle is None else str(idle).lower()
            raise ConfigError(
                f"{key}.dataloader.{name}",
                got,
                f"{want}: rows are tokenised in the training process",
            )
