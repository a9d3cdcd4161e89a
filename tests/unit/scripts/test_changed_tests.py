# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which unit tests ``run_tests.sh --quick`` chooses for a change."""

from pathlib import Path

from tests.scripts import ROOT, load_script

changed_tests = load_script("check/changed_tests")


def test_a_modules_tests_bear_its_name_or_import_it(tmp_path):
    tests = tmp_path / "tests/unit"
    tests.mkdir(parents=True)
    (tests / "test_rope.py").write_text("import json\n")
    (tests / "test_block.py").write_text("from package.models import rope\n")
    (tests / "test_late.py").write_text("def f():\n    from package.models.rope import angle\n")
    (tests / "test_other.py").write_text("import package.models.ropes\n")
    chosen = changed_tests.tests_of(["package/models/rope.py", "README.md"], tmp_path)
    names = [Path(path).name for path in chosen]
    assert names == ["test_block.py", "test_docs.py", "test_late.py", "test_rope.py"]


def test_a_changed_test_is_run_itself(tmp_path):
    tests = tmp_path / "tests/unit"
    tests.mkdir(parents=True)
    (tests / "test_rope.py").write_text("")
    assert "tests/unit/test_rope.py" in changed_tests.tests_of(
        ["tests/unit/test_rope.py"], tmp_path
    )


def test_every_choice_in_this_repository_exists():
    chosen = changed_tests.tests_of(
        ["torchtitan_lr/training/metrics.py", "torchtitan_lr/errors.py"]
    )
    assert {
        "tests/unit/training/test_metrics.py",
        "tests/unit/checks/test_config_checks.py",
    } <= set(chosen)
    assert all((ROOT / path).is_file() for path in chosen)
