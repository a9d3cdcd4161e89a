# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every mutant still applies, and one that no test notices is reported."""

import pytest

from tests.mutants.__main__ import BrokenMutant, Mutant, find_file, find_tests, read_mutants, run

MUTANTS = read_mutants()


def test_there_are_at_most_94_with_different_names():
    assert 60 < len(MUTANTS) == len({mutant.what for mutant in MUTANTS}) <= 94


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_applies(mutant):
    assert find_file(mutant).parts[0] == "torchtitan_lr" and find_tests(mutant)
    assert mutant.old != mutant.new


def test_survivors_are_reported(tmp_path):
    (tmp_path / "torchtitan_lr").mkdir()
    (tmp_path / "torchtitan_lr/__init__.py").touch()
    (tmp_path / "torchtitan_lr/two.py").write_text("TWO = 2\nTHREE = 3\n")
    (tmp_path / "tests").mkdir()
    test = "import sys\nsys.path.insert(0, '.')\nfrom torchtitan_lr.two import TWO\n"
    (tmp_path / "tests/test_two.py").write_text(f"{test}def test_two():\n    assert TWO == 2\n")
    name = ["test_two.py::test_two"]
    assert run(Mutant("wrong", "TWO = 2", "TWO = 3", name), tmp_path)
    assert not run(Mutant("unseen", "THREE = 3", "THREE = 4", name), tmp_path)
    with pytest.raises(BrokenMutant, match="occurs 0 times"):
        run(Mutant("gone", "FOUR", "FIVE", name), tmp_path)
    with pytest.raises(BrokenMutant, match="no test"):
        find_tests(Mutant("untested", "TWO = 2", "", ["test_two.py::test_three"]), tmp_path)
