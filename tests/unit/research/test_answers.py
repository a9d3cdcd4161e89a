# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Greedy answers to pairs and their scores."""

import pytest
import torch

from scripts.research.answers import Answer, answer_pairs, scores
from tests.unit.tiny import build_tiny
from torchtitan_lr.data.pairs import parse_pair

END = 95


class Letters:
    """One token per character; BOS is 94, EOS 95."""

    bos_id, eos_id = 94, END

    def encode(self, text, add_bos=True, add_eos=True):
        return [94] * add_bos + [ord(c) - 32 for c in text] + [END] * add_eos

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 32) for i in ids if i < 94)


@pytest.mark.parametrize(
    ("written", "given", "exact", "f1"),
    [
        ("Return the size.", "return  the size", True, 1.0),
        ("a b", "a c", False, 0.5),
        ("a a b", "a", False, 0.5),  # precision 1, recall 1/3
        ("a", "", False, 0.0),
        ("!", "?", True, 1.0),
    ],
)
def test_scores_of_an_answer(written, given, exact, f1):
    answer = Answer(written, given)
    assert (answer.exact, answer.f1) == (exact, pytest.approx(f1))


def test_scores_are_means():
    found = scores([Answer("a", "a"), Answer("a b", "a c"), Answer("a", "")])
    assert (found.pairs, found.exact, found.f1) == (3, pytest.approx(1 / 3), pytest.approx(0.5))
    assert scores([]).pairs == 0


@torch.no_grad()
def test_answers_are_the_most_likely_tokens_up_to_the_end():
    model = build_tiny("cola", torch.float64).eval()
    for name, parameter in model.named_parameters():
        if ".w" in name:
            parameter.mul_(6)  # initial weights hardly look at earlier tokens
    model.output.weight[END] += 0.02  # so that some answers end
    questions = ["f(x)", "a much longer question", "b", "cd", "no room: " + "x" * 40]
    records = [parse_pair({"prompt": q, "completion": "y"}) for q in questions]
    expected = []
    for question in questions[:4]:
        row = Letters().encode(question, add_eos=False)
        new = []
        while len(new) < 7 and len(row) + len(new) <= 32 and END not in new:
            new.append(int(model(torch.tensor([row + new]))[0, -1].argmax()))
        expected.append(Letters().decode([t for t in new if t != END]))
    found = list(answer_pairs(model, Letters(), records, new_tokens=7, batch_size=3))
    assert [answer.given for answer in found] == expected
    assert len(set(expected)) > 1 and {answer.written for answer in found} == {"y"}
