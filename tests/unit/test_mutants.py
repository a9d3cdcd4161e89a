# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every mutant still applies, and one that no test notices is reported."""

import pytest

from tests.mutants.__main__ import find_file, find_tests, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_applies(mutant):
    assert find_file(mutant).parts[0] == "torchtitan_lr" and find_tests(mutant)
    assert mutant.old != mutant.new
