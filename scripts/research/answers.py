# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A model's greedy answers to pairs, scored against the written ones."""

import string
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.inference.decode import Decoder, room
from torchtitan_lr.inference.sampling import Sampling
from torchtitan_lr.models.llama import LlamaModel

NEW_TOKENS = 32
"""Default limit of an answer's tokens."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Answer:
    """One answered pair.

    Attributes:
        written: The answer of the pair.
        given: The model's.
    """

    written: str
    given: str

    @property
    def exact(self) -> bool:
        """Whether both have the same words, apart from case and punctuation."""
        return _words(self.written) == _words(self.given)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall of the words, each counted as often as it occurs.

        The measure of SQuAD (Rajpurkar et al., 2016), with articles kept.
        """
        written, given = _words(self.written), _words(self.given)
        common = (Counter(written) & Counter(given)).total()
        if not common:
            return float(written == given)
        return 2 * common / (len(written) + len(given))


def _words(text: str) -> list[str]:
    return text.lower().translate(_PUNCTUATION).split()


def answer_pairs(
    model: LlamaModel,
    tokenizer: Any,
    records: Iterable[str],
    seq_len: int = 0,
    new_tokens: int = NEW_TOKENS,
    batch_size: int = 32,
) -> Iterator[Answer]:
    """Answer pairs greedily; of a chat, the last answer.

    Args:
        model: The model, on one device.
        tokenizer: The model's tokenizer.
        records: Canonical records (`data.pairs.parse_pair`).
        seq_len: Pairs whose prompts leave no room in such a window are left out, as in training;
            0 is the model's trained window.
        new_tokens: Maximum number of tokens of an answer.
        batch_size: Pairs that are answered together.

    Yields:
        The answers, in order.
    """
    encoder, args = PairEncoder(tokenizer), model.model_args
    size = (seq_len or args.max_seq_len) + 1
    usable = (record for record in records if encoder.row(record, size) is not None)
    pairs = (encoder.prompt(record) for record in usable)
    fitting = (pair for pair in pairs if 0 < len(pair[0]) <= args.max_seq_len)
    end = tokenizer.eos_id
    while batch := list(islice(fitting, batch_size)):
        prompts = [prompt for prompt, _ in batch]
        limits = [min(new_tokens, room(args, len(prompt))) for prompt in prompts]
        stops = () if end is None else (end,)
        greedy = Sampling(temperature=0)
        decoder = Decoder(model, prompts, limits, greedy, [0] * len(batch), stop_ids=stops)
        tokens: list[list[int]] = [[] for _ in batch]
        while any(decoder.running):
            for row, token in enumerate(decoder.step()):
                if token is not None and token != end:
                    tokens[row].append(token)
        for (_, written), given in zip(batch, tokens, strict=True):
            yield Answer(written, tokenizer.decode(given, skip_special_tokens=True))


@dataclass(frozen=True)
class Scores:
    """Means over pairs.

    Attributes:
        pairs: Number of pairs.
        exact: Share of exact answers.
        f1: Mean F1 of the words.
    """

    pairs: int
    exact: float
    f1: float


def scores(answers: Iterable[Answer]) -> Scores:
    """Return the means over answers; zeros without any."""
    found = list(answers)
    count = max(1, len(found))
    exact = sum(answer.exact for answer in found) / count
    return Scores(len(found), exact, sum(answer.f1 for answer in found) / count)
