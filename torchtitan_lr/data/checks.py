# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of a run's corpora before any rank starts: they exist, are prepared, and long enough."""

from __future__ import annotations

from typing import Any

from torchtitan_lr.data.prepare import Wanted, data_ranks, wanted
from torchtitan_lr.data.rows import Rows, open_rows
from torchtitan_lr.data.sources import Reader
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import logger


def check_corpora(config: Any, world_size: int) -> None:
    """Check the corpora of a run; prepare them if that was not done.

    Args:
        config: The run's ``JobConfig``; sections ``training`` and ``validation`` are read.
        world_size: Ranks of the run.

    Raises:
        ConfigError: A corpus that does not exist or cannot be prepared, that has no whole row, or
            a validation corpus with training files.
        DataError: A record or a shard is unreadable.
    """
    validates = config.validation.enable
    trained = wanted(config, "training", world_size)
    if validates and config.validation.dataset == "local":
        _check_other_files(wanted(config, "validation", world_size), trained)
    _tell_of_cut_pairs(open_rows(config, "training", world_size)[1], "training")
    if not validates:
        return
    section = config.validation
    held_out = open_rows(config, "validation", world_size)[1]
    _tell_of_cut_pairs(held_out, "validation")
    rows = sum(map(len, held_out))
    batch = section.local_batch_size * data_ranks(config, world_size)
    if rows < batch:
        logger.warning(
            "The held-out part has %d sequences of %d tokens, fewer than a validation batch of %d",
            *(rows, section.seq_len, batch),
        )


def _tell_of_cut_pairs(opened: list[Rows], key: str) -> None:
    for part in (part for part in opened if part.pairs and part.cut):
        logger.warning(
            "%d pairs of %s are longer than %s.seq_len = %d and are cut; %d of them have no room "
            "for an answer and are left out",
            *(part.cut, part.corpus.folder, key, part.seq_len, part.left_out),
        )


def _check_other_files(validated: list[Wanted], trained: list[Wanted]) -> None:
    """Raise if the named validation corpus contains training files."""

    def files(parts: list[Wanted]) -> set[str]:
        sources = (source for part in parts for source in part.sources if source.name == "local")
        return {str(file.resolve()) for source in sources for file in Reader(source).files}

    if shared := sorted(files(validated) & files(trained)):
        advice = "validation.dataset = 'training' takes what is held out from it"
        want = f"files that are not trained on ({shared[0]} is); {advice}"
        raise ConfigError("validation.dataset_path", str(validated[0].sources[0]), want)
