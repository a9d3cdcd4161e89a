# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Documents kept apart by the masks of GPUs, on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import flex_attention as flex

from torchtitan_lr.data.corpus import labelled
from torchtitan_lr.models import llama
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.titan import IGNORE_INDEX, base


@contextmanager
def masks_of_blocks(attention: Callable[..., Any] = flex.flex_attention) -> Iterator[None]:
    """Use ``flex_attention``'s masks and plain formula: compiled it has no backward on a CPU."""
    with (
        patch.object(llama, "BLOCK_MASK_DEVICES", ("cpu",)),
        patch.object(llama, "create_attention_mask", flex.create_block_mask),
        patch.object(base.FlexAttentionWrapper, "_compiled_flex_attn", attention),
        patch.object(flex, "_validate_device", lambda *_: None),
    ):
        yield


BOS = 0
LENGTHS = [(7, 2, 12, 11), (1, 30, 1), (32,)]  # of the documents of each row


def documents():
    """Rows of documents, each BOS, text and, if there is room, EOS."""
    generator = torch.Generator().manual_seed(5)
    return [
        [
            torch.cat([torch.tensor([BOS]), torch.randint(2, 96, (n - 1,), generator=generator)])
            for n in row
        ]
        for row in LENGTHS
    ]


def packed():
    rows = torch.stack([torch.cat(row) for row in documents()])
    after = torch.full((len(rows), 1), 17)
    return rows, torch.cat([rows[:, 1:], after], dim=1)


def gradients(model):
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()
    }
    return {name: p.grad.clone() for name, p in found.items()}


def alone(model):
    """Loss and gradients of the documents one by one, without a mask."""
    model.zero_grad()
    _, labels = packed()
    total = torch.zeros((), dtype=torch.float64)
    for row, row_labels in zip(documents(), labels, strict=True):
        start = 0
        for document in row:
            target = row_labels[start : start + len(document)].clone()
            start += len(document)
            if start < len(row_labels):
                target[-1] = IGNORE_INDEX  # the next document's first token
            loss = cross_entropy_sum(model(document[None]), target[None])
            loss.backward()
            total += loss.detach()
    return total, gradients(model)


def together(model, change=None):
    model.zero_grad()
    inputs, labels = packed()
    tokens = torch.cat([inputs, labels[:, -1:]], dim=1).numpy()
    batch, labels = labelled(tokens, begins=tokens == BOS)
    found = batch["documents"] if change is None else change(batch["documents"])
    inputs, found, labels = (x.to(model.freqs_cis.device) for x in (inputs, found, labels))
    loss = cross_entropy_sum(model(inputs, documents=found), labels)
    loss.backward()
    return loss.detach(), gradients(model)


def difference(ours, theirs):
    worst = abs(ours[0] / theirs[0] - 1).item()
    for name, gradient in ours[1].items():
        expected = theirs[1][name]
        worst = max(worst, ((gradient - expected).norm() / expected.norm()).item())
    return worst
