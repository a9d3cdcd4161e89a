# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The questions about the embedded corpus."""

import random
from collections import Counter

from torchtitan_lr.data.continuations import CHOICES, build_questions, load_questions
from torchtitan_lr.data.corpora import PythonStdlib


def files(number=12, lines=60):
    source = random.Random(1)
    return [
        "".join(f"file{i} = {source.random()} * {source.random()}\n" for _ in range(lines))
        for i in range(number)
    ]


def test_the_right_choice_follows_and_no_other_does():
    texts = files()
    questions = build_questions(texts, 30)
    assert len(questions) == 30
    for index, question in enumerate(questions):
        context, choices, label = (question[key] for key in ("context", "choices", "label"))
        own = texts[index % len(texts)]
        follows = [own.find(context + choice) >= 0 for choice in choices]
        assert follows == [place == label for place in range(CHOICES)]
        assert len(set(choices)) == CHOICES
        for place, choice in enumerate(choices):
            assert (choice in own) == (place == label)  # the others are from other files
    counts = Counter(question["label"] for question in questions)
    assert len(counts) == CHOICES and max(counts.values()) < 20


def test_a_seed_determines_them():
    texts = files()
    assert build_questions(texts) == build_questions(texts)
    assert build_questions(texts) != build_questions(texts, seed=1)


def test_files_that_are_too_short_are_left_out():
    texts = [*files(5), "x = 1\n", "\n" * 500]
    questions = build_questions(texts, 14)
    assert len(questions) == 14
    assert all("file" in question["context"] for question in questions)
    assert build_questions(["x = 1\n"] * 5, 3) == []


def test_they_are_of_the_held_out_part(small_library):
    questions = load_questions(max_length=7)["test"].to_list()
    held_out, trained = (
        build_questions(list(PythonStdlib(split, "k"))) for split in ("validation", "train")
    )
    assert questions == held_out != trained and questions
