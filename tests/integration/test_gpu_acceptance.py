# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/gpu_acceptance.py``: a rehearsal of all its parts with tiny models on the CPU."""

import json
import sys

from tests.integration import runs

ACCEPTANCE = [sys.executable, "scripts/check/gpu_acceptance.py", "--tiny", "--commit=abc"]
PARTS = ["main", "smoke", "tests", "speed", "memory", "tsr", "block", "peers"]
RUN_HERE = {"main", "speed", "block"}
"""The parts that need no GPU at this size."""


def results(report, name):
    return {job["name"]: job for job in report["parts"][name]["jobs"]}


def test_a_rehearsal(tmp_path):
    done = runs.run([*ACCEPTANCE, f"--out={tmp_path}"])
    assert done.status == 0, done.everything
    text = (tmp_path / "gpu_acceptance.json").read_text()
    report = json.loads(text)
    assert list(report["parts"]) == PARTS
    for name in PARTS:
        for job in results(report, name).values():
            assert job["status"] == ("passed" if name in RUN_HERE else "skipped"), job
            assert bool(job["reason"]) == (job["status"] == "skipped")
    (main,) = results(report, "main").values()
    assert main["values"]["steps"] == 2 and main["values"]["train_loss"] > 0
    assert main["values"]["note"].startswith("1 rank: training with --parallelism.tensor_parallel")
    speeds = results(report, "speed")
    assert list(speeds) == ["full 16×2 eager", "cola 16×2 eager"]
    for job in speeds.values():
        values = job["values"]
        assert values["tokens_per_s"] * values["step_ms"] / 1e3 > 0 and values["mfu"] is None
    (block,) = results(report, "block").values()
    assert block["values"]["matmul_tflops"] > 0
    assert [row["variant"] for row in block["values"]["table"]["rows"]] == ["btp_column"]
    machine = report["machine"]
    assert (machine["device"], machine["devices"], machine["commit"]) == (None, 0, "abc")
    # The page has every command as it can be typed anywhere, and the reason of what was skipped.
    page = (tmp_path / "gpu_acceptance.md").read_text()
    assert "python -m torchtitan_lr.launch --job.dump_folder=outputs/main" in page
    assert sys.executable not in page + text and "tmp" not in page
    for name in set(PARTS) - RUN_HERE:
        for job in results(report, name).values():
            assert f"- {job['name']} skipped: {job['reason']}" in page

    # A second call on the same machine and commit completes the report, and repeats nothing.
    again = runs.run([*ACCEPTANCE, f"--out={tmp_path}", "--missing", "--only", "main", "peers"])
    assert again.status == 0, again.everything
    completed = json.loads((tmp_path / "gpu_acceptance.json").read_text())
    assert completed["parts"] == report["parts"]
