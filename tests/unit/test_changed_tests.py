# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which unit tests ``run_tests.sh --quick`` chooses for a change."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script():
    path = ROOT / "scripts/check/changed_tests.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_modules_tests_bear_its_name_or_import_it(tmp_path):
    tests = tmp_path / "tests/unit"
    tests.mkdir(parents=True)
    (tests / "test_rope.py").write_text("import json\n")
    (tests / "test_block.py").write_text("from package.models import rope\n")
    (tests / "test_late.py").write_text("def f():\n    from package.models.rope import angle\n")
    (tests / "test_other.py").write_text("import package.models.ropes\n")
    chosen = script().tests_of(["package/models/rope.py", "README.md"], tmp_path)
    names = [Path(path).name for path in chosen]
    assert names == ["test_block.py", "test_docs.py", "test_late.py", "test_rope.py"]


def test_a_changed_test_is_run_itself(tmp_path):
    tests = tmp_path / "tests/unit"
    tests.mkdir(parents=True)
    (tests / "test_rope.py").write_text("")
    assert "tests/unit/test_rope.py" in script().tests_of(["tests/unit/test_rope.py"], tmp_path)


def test_every_choice_in_this_repository_exists():
    chosen = script().tests_of(["torchtitan_lr/metrics.py", "torchtitan_lr/errors.py"])
    assert {"tests/unit/test_metrics.py", "tests/unit/test_config_checks.py"} <= set(chosen)
    assert all((ROOT / path).is_file() for path in chosen)
