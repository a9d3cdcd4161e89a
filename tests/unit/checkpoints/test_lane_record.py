# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A checkpoint knows the lanes of its model."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.tiny import build_tiny, tiny_args
from torchtitan_lr.checkpoints.lane_record import (
    ORDINARY,
    Lanes,
    check_lanes,
    record_of,
    stored_lanes,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.loading import load_model


def save(folder: Path, lanes: Lanes) -> Path:
    weights = build_tiny("full").state_dict()
    dcp.save({**weights, **record_of(lanes)}, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", [ORDINARY, (4, 0.3), (2, 1.0), (4, 0.0)])
def test_it_is_read_back_exactly(lanes: Lanes, tmp_path: Path) -> None:
    assert stored_lanes(save(tmp_path, lanes)) == lanes
    check_lanes(tmp_path, lanes)


def test_an_ordinary_checkpoint_holds_nothing_new() -> None:
    assert record_of(ORDINARY) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stored", "here", "line"),
    [
        ((4, 0.5), (2, 0.5), "caat.lanes: got 2, expected 4 "),
        ((4, 0.5), (4, 0.25), "caat.sync_fraction: got 0.25, expected 0.5 "),
        ((4, 0.5), ORDINARY, "caat.lanes: got 1, expected 4 "),
        (ORDINARY, (4, 1.0), "caat.lanes: got 4, expected 1 "),
    ],
)
def test_other_lanes_are_refused(stored: Lanes, here: Lanes, line: str, tmp_path: Path) -> None:
    save(tmp_path, stored)
    with pytest.raises(ConfigError) as error:
        check_lanes(tmp_path, here)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_loaded_with_its_lanes_only(tmp_path: Path) -> None:
    save(tmp_path, (4, 0.5))
    model = load_model(tmp_path, tiny_args("full", lanes=4, sync_fraction=0.5))
    assert torch.equal(model.output.weight, build_tiny("full").output.weight)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"^caat\.lanes: got 1, expected 4 "):
        load_model(tmp_path, tiny_args("full"))
