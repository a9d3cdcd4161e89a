# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where documents begin in packed windows, for ``training.mask_documents``.

The documents' indices are read off the tokens: every document begins with BOS, or, with a tokenizer
without BOS, ends with EOS. Every pipeline stage and tensor-parallel rank has the same tokens, so
nothing is sent. The label behind a document's last token, which would be the next document's first,
is ignored: what is left is the loss of each document alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import BaseTokenizer

DOCUMENTS = "documents"
"""Name of the indices in a batch's inputs, and of the model's argument."""

Batch = tuple[dict[str, Tensor], Tensor]
"""``({"input": (b, s), ...}, labels (b, s))``."""


@dataclass(frozen=True)
class DocumentBorders:
    """Finds the borders by a token.

    Attributes:
        token: The token.
        begins: Whether it is a document's first token, and not its last.
    """

    token: int
    begins: bool

    @staticmethod
    def of(job_config: Any, tokenizer: BaseTokenizer) -> DocumentBorders | None:
        """Return the borders of a run; None if its documents are not masked.

        Raises:
            ConfigError: The tokenizer has neither BOS nor EOS.
        """
        if not getattr(job_config.training, "mask_documents", False):
            return None
        for name, begins in (("bos_id", True), ("eos_id", False)):
            if (token := getattr(tokenizer, name, None)) is not None:
                return DocumentBorders(int(token), begins)
        want = "false: the tokenizer has no BOS or EOS token that separates documents"
        raise ConfigError("training.mask_documents", True, want)

    def documents(self, inputs: Tensor) -> Tensor:
        """Return the index of each token's document, from 0 or 1 in each row: int64 (b, s)."""
        here = inputs == self.token
        return here.cumsum(1) - (0 if self.begins else here.long())

    def crossing(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return which labels are of another document than their input, bool (b, s)."""
        return labels == self.token if self.begins else inputs == self.token

    def split(self, inputs: Tensor, labels: Tensor) -> Batch:
        """Add the documents' indices to a batch, and ignore labels across a border.

        Args:
            inputs: Packed tokens (b, s).
            labels: The next tokens (b, s).

        Returns:
            ``({"input": inputs, "documents": (b, s)}, labels)``.
        """
        crossing = self.crossing(inputs, labels)
        batch = {"input": inputs, DOCUMENTS: self.documents(inputs)}
        return batch, labels.masked_fill(crossing, IGNORE_INDEX)


def separated(borders: DocumentBorders | None, inputs: Tensor, labels: Tensor) -> Batch:
    """Return a batch with its documents kept apart, or as it is without borders."""
    return ({"input": inputs}, labels) if borders is None else borders.split(inputs, labels)


def model_arguments(input_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's keyword arguments of a batch: all but the tokens."""
    return {name: value for name, value in input_dict.items() if name != "input"}


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """Return a batch on a device."""
    inputs, labels = batch
    return {name: value.to(device) for name, value in inputs.items()}, labels.to(device)
