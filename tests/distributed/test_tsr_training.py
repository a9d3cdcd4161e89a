# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam through the trainer: every layout trains like one process, and resumes (fp64)."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import LOSS_GAP, loss_gap, train
from tests.distributed.tsr_runs import BATCH, LAYOUTS, TSR
from tests.support.nightly import nightly
from tests.support.parity_runs import BF16, EXACT, largest_difference
from tests.support.rank_pool import RankPool


def model(family: str) -> list[str]:
    return [f"--model.name=llama_{family}", *TSR]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("full", layout) for layout in ("replicate4_accumulate2", "hsdp2x2")),
        *(("lax", layout) for layout in ("fsdp2xtp2", "pp2xdp2")),
        *nightly(
            *(("full", layout) for layout in ("replicate4", "fsdp4", "fsdp2xtp2", "pp2xdp2")),
            ("full", "tp2xdp2"),
        ),
    ],
)
def test_layout_equals_one_process(
    family: str, layout: str, four_ranks: RankPool, reference: Any
) -> None:
    runs = four_ranks.run(train, [*model(family), *LAYOUTS[layout]])
    assert largest_difference(runs[0], reference(*model(family))) < EXACT


def test_options_hold_through_the_trainer(four_ranks: RankPool, reference: Any) -> None:
    options = [
        "--optimizer.tsr_stagger",
        "--optimizer.tsr_compress_head",
        "--optimizer.tsr_moments=keep",
        "--optimizer.tsr_overlap_buckets=2",
        "--activation_checkpoint.mode=full",
        *("--compile.enable", "--compile.backend=eager"),
    ]
    run = four_ranks.run(train, [*model("full"), *LAYOUTS["hsdp2x2"], *options])[0]
    alone = reference(*model("full"), *options[:4])
    assert largest_difference(run, alone) < EXACT


def test_mixed_precision_is_the_same_regime(
    four_ranks: RankPool, one_rank: RankPool, tmp_path: Path
) -> None:
    """A basis of rounded gradients is another one, so losses are compared, not weights."""
    # A small learning rate: large steps multiply the differences, on some corpora sixfold. The
    # records are alike, so that the loss falls enough for the control.
    records = (f"record {number}: one of many that are alike\n" for number in range(4000))
    (tmp_path / "alike.txt").write_text("\n".join(records))
    options = [*model("full"), *BF16, "--training.steps=8", "--optimizer.lr=3e-3"]
    options += ["--training.dataset=local", f"--training.dataset_path={tmp_path}/alike.txt"]
    alone = one_rank.run(train, [*options, *BATCH[8]])[0]["losses"]
    run = four_ranks.run(train, [*options, *LAYOUTS["hsdp2x2"]])[0]["losses"]
    limit = LOSS_GAP / 4  # 0.0007 here, and 0.029 for the control
    assert loss_gap(run, alone) < limit
    half = [*options, *LAYOUTS["hsdp2x2"], "--training.mixed_precision_reduce=bfloat16"]
    runs = four_ranks.run(train, half, "", "", True, True)
    assert 0 < loss_gap(runs[0]["losses"], alone) < limit
    for name, value in runs[0]["parameters"].items():
        assert all((rank["parameters"][name] == value).all() for rank in runs), name
    # The control: another rank.
    other = one_rank.run(train, [*options, *BATCH[8], "--optimizer.tsr_rank=8"])[0]["losses"]
    assert loss_gap(other, alone) > 10 * limit


def test_bf16_weights_keep_fp32_state(four_ranks: RankPool) -> None:
    """Replicas of bf16 weights end equal in every bit, and the state is what it is elsewhere."""
    options = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
    arguments = [*model("full"), *LAYOUTS["replicate4"], *options]
    runs = four_ranks.run(train, arguments, "", "", True, True)
    assert runs[0]["state_dtypes"] == {"float32", "int64"}
    for name, value in runs[0]["parameters"].items():
        assert all((run["parameters"][name] == value).all() for run in runs), name


@pytest.mark.parametrize("fault", [*nightly("nan@3"), "nan_gradient@3", "nan_gradient@4"])
def test_a_skipped_step_leaves_no_trace(fault: str, four_ranks: RankPool) -> None:
    """Step 4 refreshes (three are done before it), step 3 does not."""
    options = [*model("cola"), *LAYOUTS["replicate4"], "--training.steps=5"]
    options.append("--training.max_skipped_steps=1")
    runs = four_ranks.run(train, options, fault, "", True, True)
    assert [run["skipped_steps"] for run in runs] == [1, 1, 1, 1]
    assert all(loss == loss for loss in runs[0]["losses"][-1:])
    for name, value in runs[0]["parameters"].items():
        assert (value == value).all(), name


SAVING = ["--training.steps=5", "--checkpoint.enable", "--checkpoint.interval=2"]


@pytest.fixture(scope="module")
def undisturbed(four_ranks: RankPool) -> dict[str, Any]:
    return four_ranks.run(train, [*model("full"), *SAVING, *LAYOUTS["hsdp2x2"]])[0]


@pytest.fixture(scope="module")
def interrupted_run(four_ranks: RankPool) -> Path:
    run = four_ranks.run(train, [*model("full"), *SAVING, *LAYOUTS["hsdp2x2"]], "sigterm@4")[0]
    assert run["step"] == 4
    return Path(run["dump_folder"])


@pytest.fixture
def interrupted(interrupted_run: Path, tmp_path: Path) -> str:
    """A copy of a run that a signal stopped after step 4."""
    return str(shutil.copytree(interrupted_run, tmp_path / "run"))


def test_resumes_bitwise(
    interrupted: str, four_ranks: RankPool, undisturbed: dict[str, Any]
) -> None:
    assert (Path(interrupted) / "checkpoint/step-4/.metadata").is_file()
    options = [*model("full"), *SAVING, *LAYOUTS["hsdp2x2"]]
    resumed = four_ranks.run(train, options, "", interrupted)[0]
    assert resumed["losses"] == undisturbed["losses"]
    assert largest_difference(resumed, undisturbed) == 0.0


@pytest.mark.parametrize("layout", [*nightly("fsdp4"), "tp2xdp2"])
def test_resumes_in_another_layout(
    interrupted: str, layout: str, four_ranks: RankPool, undisturbed: dict[str, Any]
) -> None:
    options = [*model("full"), *SAVING, *LAYOUTS[layout]]
    resumed = four_ranks.run(train, options, "", interrupted)[0]
    assert largest_difference(resumed, undisturbed) < EXACT
