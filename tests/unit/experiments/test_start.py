# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import os

import pytest

from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.experiments.start import run_on_ranks


def test_ranks_that_fail_are_one_line_and_a_folder(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from torchtitan_lr.experiments.start import report_from_rank\n"
        "report_from_rank(lambda _: 1 // 0, [])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RunFailedError) as info:
        run_on_ranks("broken", [], ranks=1)
    (kept,) = tmp_path.glob("torchtitan_lr-ranks-*/*/attempt_0/0")
    line = "error: rank 0 failed: ZeroDivisionError: integer division or modulo by zero"
    assert str(info.value) == f"{line}; its output: {kept}"
    assert "Traceback" in (kept / "stderr.log").read_text()
