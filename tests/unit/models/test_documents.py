# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Packed documents give the loss and the gradients of each document alone (fp64)."""

import pytest
import torch

from tests.unit.tiny import FAMILIES, build_tiny
from torchtitan_lr.data.rows import labelled
from torchtitan_lr.models.llama import separate
from torchtitan_lr.models.loss import cross_entropy_sum
from torchtitan_lr.parallel.recompute import apply_low_rank_checkpoint
from torchtitan_lr.titan import IGNORE_INDEX

BOS, EOS = 0, 1
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
    loss = cross_entropy_sum(model(inputs, documents=found), labels)
    loss.backward()
    return loss.detach(), gradients(model)


def difference(ours, theirs):
    worst = abs(ours[0] / theirs[0] - 1).item()
    for name, gradient in ours[1].items():
        expected = theirs[1][name]
        worst = max(worst, ((gradient - expected).norm() / expected.norm()).item())
    return worst


CASES = [(family, {}) for family in FAMILIES]
CASES += [("cola", {"n_kv_heads": 2}), ("full", {"lanes": 2, "sync_fraction": 0.5})]
CASES += [("cola", {"lanes": 2, "sync_fraction": 0.5})]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_loss_and_gradients_are_those_of_each_document(family, changes):
    model = build_tiny(family, torch.float64, **changes)
    expected = alone(model)
    assert difference(together(model), expected) < 1e-12
    assert difference(together(model, change=torch.zeros_like), expected) > 1e-2


@pytest.mark.parametrize("save_attention", [True, False])
def test_low_rank_checkpointing(save_attention):
    model = build_tiny("lax", torch.float64)
    expected = together(model)
    apply_low_rank_checkpoint(model, save_attention)
    assert difference(together(model), expected) < 1e-12


def test_compiled_blocks():
    model = build_tiny("cola", torch.float64, n_layers=1)
    expected = together(model)
    for block in model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    assert difference(together(model), expected) < 1e-12


def test_positions_restart_and_later_documents_are_hidden():
    found = torch.tensor([[3, 3, 5, 5, 5, 3], [0, 0, 0, 0, 0, 0]])
    assert separate(found, torch.float64)[0].tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    seen = (separate(torch.tensor([[1, 1, 2]]), torch.float64)[1] == 0)[0, 0]
    assert seen.tolist() == [[True, False, False], [True, True, False], [False, False, True]]
