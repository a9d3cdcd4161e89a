# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/slurm/train.sbatch`` is bash, and Slurm finds its options."""

from tests.integration import runs


def test_the_script_is_bash():
    script = runs.ROOT / "scripts/slurm/train.sbatch"
    done = runs.run(["bash", "-n", script])
    assert (done.status, done.err) == (0, "")
    lines = script.read_text().splitlines()
    # Slurm reads its options up to the first command.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert options and all(lines.index(line) < first for line in options)
