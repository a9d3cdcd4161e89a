# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The validation loss once more, as plainly as possible: one sequence after the other, in fp64."""

import torch


def windows(documents, seq_len):
    """Cuts documents (lists of ids) into windows of seq_len + 1 ids, all of them full."""
    stream = [token for document in documents for token in document]
    size = seq_len + 1
    return [stream[i * size : (i + 1) * size] for i in range(len(stream) // size)]


def token_losses(logits, labels):
    """Returns -log softmax(logits)[label] of each position; logits (s, V), labels (s,)."""
    logits = logits.double()
    largest = logits.max(dim=1, keepdim=True).values
    log_sum = (logits - largest).exp().sum(1).log() + largest[:, 0]
    return log_sum - logits[torch.arange(len(labels)), labels]


@torch.no_grad()
def sequence_losses(model, sequences):
    """Returns the losses of each window's tokens, (n, s), by calling the model n times."""
    rows = []
    for sequence in sequences:
        tokens = torch.tensor(sequence)
        (logits,) = model(tokens[None, :-1])
        rows.append(token_losses(logits, tokens[1:]))
    return torch.stack(rows)
