# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plain values are copied at once, tensors in a thread, into the buffers of the save before."""

import threading
from typing import Any

import pytest
import torch

from torchtitan_lr.checkpoints import staging
from torchtitan_lr.checkpoints.staging import BackgroundStager


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies start when it is set."""
    event, copied = threading.Event(), staging._copied

    def later(*parts: Any) -> Any:
        assert event.wait(30)
        return copied(*parts)

    monkeypatch.setattr(staging, "_copied", later)
    return event


def test_plain_values_are_those_of_the_call(held: threading.Event) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    position = {"lanes": [1, [2]], "name": "c4", "bad": {"row 7"}}
    stager = BackgroundStager()
    future = stager.stage({"weight": weight.T, "data": position, "betas": (0.9, weight[:1])})
    position["lanes"][1].append(3)
    position["name"] = "other"
    position["bad"].add("row 9")
    assert not future.done()
    held.set()
    staged = future.result()
    assert staged["data"] == {"lanes": [1, [2]], "name": "c4", "bad": {"row 7"}}
    assert torch.equal(staged["weight"], weight.T)
    assert staged["betas"][0] == 0.9
    assert torch.equal(staged["betas"][1], weight[:1])
    assert staged["weight"].untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
    stager.close()


def test_the_next_save_uses_the_same_memory() -> None:
    stager = BackgroundStager()
    weight, moment = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    first = stager.stage({"weight": weight, "moment": moment}).result()
    addresses = {name: value.data_ptr() for name, value in first.items()}
    weight.add_(1)
    second = stager.stage({"weight": weight, "moment": moment}).result()
    assert {name: value.data_ptr() for name, value in second.items()} == addresses
    assert second["weight"].tolist() == [2, 2, 2]
    # Another dtype or shape takes other memory.
    third = stager.stage({"weight": torch.ones(4), "moment": moment.double()}).result()
    assert [value.dtype for value in third.values()] == [torch.float32, torch.float64]
    assert third["weight"].tolist() == [1, 1, 1, 1]
    stager.close()
