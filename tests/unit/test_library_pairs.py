# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The shipped pairs: functions of the shipped library and their docstrings."""

import hashlib
import json
from itertools import chain

import pytest

from scripts.research.library_pairs import CUE, documented_functions, library_pairs
from torchtitan_lr.data.sources import Reader, Source

LIBRARY = '''
def first(x):
    """Return x.

    More.
    """
    return x


class A:
    @property
    def second(self):  # a comment
        "Says nothing"
        y = """a
string"""
        return y

    def third(self):
        """Only this."""

    def fourth(self): "One line"; return 4
\x0c
async def fifth():
    """
    Starts late.
    """
    pass
'''


def test_functions_lose_their_docstrings():
    found = [json.loads(record) for record in documented_functions(LIBRARY)]
    answers = [" Return x.", " Says nothing", " Starts late."]
    assert [record["completion"] for record in found] == answers
    prompts = [record["prompt"].removesuffix(CUE) for record in found]
    assert prompts[0] == "def first(x):\n    return x"
    assert prompts[1].startswith("    def second(self):  # a comment\n        y =")
    assert prompts[2] == "async def fifth():\n    pass"


@pytest.mark.nightly  # it parses the whole library; its parts are above
def test_the_shipped_file_is_that_of_the_script_and_holds_out_the_files_of_cpython():
    parts = [], []
    for line in library_pairs():
        module = json.loads(line)
        held_out = int(hashlib.sha256(module["path"].encode()).hexdigest(), 16) % 20 == 0
        parts[held_out].extend(module["text"].split("\n"))
    reader = Reader(Source("python_stdlib_docs"))
    for held_out, pairs in enumerate(parts):
        assert sorted(reader.texts(held_out)) == sorted(pairs) and len(pairs) > 100
    # What is held out of the pairs is not in the text that is trained on.
    held = list(chain(*map(documented_functions, Reader(Source("cpython")).texts(held_out=True))))
    assert set(parts[1]) <= set(held)
