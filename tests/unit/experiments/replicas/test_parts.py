# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data positions, fingerprints, sums and healing of replicas that come and go; without torchft."""

import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.replicas.commits import Sums, add_commit
from torchtitan_lr.experiments.replicas.fingerprint import check_same, run_fingerprint
from torchtitan_lr.experiments.replicas.positions import DataPositions, PartReader
from torchtitan_lr.experiments.replicas.state import digest
from torchtitan_lr.experiments.replicas.transport import HealTransport
from torchtitan_lr.training.history import read_history
from torchtitan_lr.training.step_data import StepData

pytestmark = pytest.mark.nightly


class Loader:
    """Counts up; its state is the next number."""

    def __init__(self):
        self.at, self.reads = 0, 0

    def read(self):
        self.at, self.reads = self.at + 1, self.reads + 1
        return self.at - 1

    def move(self, state):
        self.at = 0 if state is None else state["at"]


def reader():
    loader = Loader()
    return loader, PartReader(loader.read, loader.move)


def test_a_lost_step_takes_the_same_data_again():
    positions, (loader, part) = DataPositions(3), reader()
    assert [part.next(positions, 1) for _ in range(3)] == [0, 0, 0]
    positions.commit([0, 1], {})
    part.committed()
    assert part.next(positions, 1) == 1
    assert loader.reads == 2


def test_a_commit_that_this_replica_missed_drops_its_data():
    positions, (_, part) = DataPositions(3), reader()
    assert part.next(positions, 1) == 0
    positions.commit([0, 1], {})  # healed from a member that has committed with this one
    assert part.next(positions, 1) == 1


def test_a_newcomer_goes_on_behind_what_was_committed():
    positions = DataPositions(3)
    for _ in range(5):
        positions.commit([0, 2], {})
    _, part = reader()
    assert part.next(positions, 2) == 5
    assert part.next(positions, 2) == 5
    positions.commit([0, 2], {2: {"at": 6}})
    positions.commit([0, 2], {})
    again, part = reader()
    assert part.next(positions, 2) == 7
    assert again.reads == 2  # from the exchanged position: one skipped, one taken
    _, part = reader()
    assert part.next(positions, 1) == 0  # no replica has read this part


def test_positions_survive_json_and_know_their_parts():
    positions = DataPositions(3)
    positions.commit([0, 2], {2: {"at": 1}})
    same = DataPositions(3)
    same.load_json(positions.as_json())
    assert (same.taken, same.known) == ([1, 0, 1], {2: (1, {"at": 1})})
    with pytest.raises(ValueError, match="3 parts, not 2"):
        DataPositions(2).load_json(positions.as_json())


def fingerprint(*arguments):
    module = "--job.custom_config_module=torchtitan_lr.experiments.replicas.job_config"
    config = build_job_config([module, *arguments])
    return run_fingerprint(config, {"low_rank.rank": 8}, "corpus")


@pytest.mark.parametrize(
    "option", ["optimizer.tsr_rank=64", "training.seq_len=64", "fault_tolerance.group_size=4"]
)
def test_another_configuration_is_refused_by_its_key(option):
    key = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: got .*, as replica 1 have"):
        check_same(fingerprint(), fingerprint(f"--{option}"), "replica 1")


def sums(loss, valid, nominal, replica):
    labels = torch.zeros(1, 8, dtype=torch.int64)
    data = StepData([({}, labels)], valid, float(valid), None)
    section = SimpleNamespace(group_size=3, replica_id=replica)
    return list(Sums.of(data, loss / nominal, False, nominal, section))


def test_the_loss_is_the_mean_over_the_tokens_of_the_members():
    nominal = 24.0
    both = Sums(*map(sum, zip(sums(16.0, 8, nominal, 0), sums(2.0, 4, nominal, 2), strict=True)))
    assert both.loss(nominal) == pytest.approx(18.0 / 12)
    assert both.largest([0, 2]) == pytest.approx(2.0)
    assert both.read == 16
    bad = Sums(*map(sum, zip(sums(math.nan, 8, nominal, 0), sums(2.0, 4, nominal, 2), strict=True)))
    assert math.isnan(bad.loss(nominal))


def test_the_log_of_commits_survives_a_kill(tmp_path):
    path = tmp_path / "replica_0" / "commits.jsonl"
    add_commit(path, 3, [0, 2], [3, 0, 3], 16.0, loss=1.5)
    with path.open("a") as file:
        file.write('{"step": 4, "repl')
    (record,) = read_history(path)
    assert record["step"] == 3 and record["replicas"] == [0, 2] and record["loss"] == 1.5


def test_a_digest_covers_every_bit():
    state = {"a": [torch.zeros(3)], "step": 1}
    assert digest(state) == digest({"step": 1, "a": [torch.zeros(3)]})
    assert digest(state) != digest({"a": [torch.tensor([0.0, 0.0, -0.0])], "step": 1})
    assert digest(state) != digest({"a": [torch.zeros(3)], "step": 2})


@pytest.fixture
def transports():
    made = []

    def make(found):
        made.append(HealTransport("127.0.0.1", found))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


WAIT = timedelta(seconds=20)


def test_a_newcomer_gets_the_state(transports):
    old, new = transports({"rank": 8}), transports({"rank": 8})
    weights = torch.arange(4.0)
    old.send_checkpoint([1], 7, {"w": weights, "step": 7}, WAIT)
    weights.zero_()  # training goes on: the state was copied
    state = new.recv_checkpoint(0, old.metadata(), 7, WAIT)
    assert state["step"] == 7
    assert state["w"].tolist() == [0, 1, 2, 3]
    assert new.bytes_received > 0 and new.refusal is None


def test_a_newcomer_of_another_run_is_refused_first(transports):
    old, new = transports({"low_rank.rank": 8}), transports({"low_rank.rank": 16})
    old.send_checkpoint([1], 7, {"w": torch.zeros(4)}, WAIT)
    with pytest.raises(ConfigError, match=r"low_rank\.rank: got 16, expected 8"):
        new.recv_checkpoint(0, old.metadata(), 7, WAIT)
    assert isinstance(new.refusal, ConfigError)
    assert new.bytes_received == 0


class Evil:
    def __reduce__(self):
        return print, ("code of another machine",)


def test_a_state_cannot_run_code(transports, capsys):
    old, new = transports({}), transports({})
    old.send_checkpoint([1], 7, {"w": Evil()}, WAIT)
    with pytest.raises(Exception, match=r"[Ww]eights_only|weights only"):
        new.recv_checkpoint(0, old.metadata(), 7, WAIT)
    assert capsys.readouterr().out == ""


def test_a_checkpoint_of_other_rows_or_of_another_kind_is_refused(tmp_path, monkeypatch):
    from torchtitan_lr.experiments.replicas.checkpoints import StoredPositions

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    positions = DataPositions(2)
    positions.commit([1], {1: {"sample_index": 4, "lane_2": "{}"}})
    saved = {"dataloader": StoredPositions(positions).state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "replicas", no_dist=True)
    path = str(tmp_path / "replicas")

    def check(*state, part=1, parts=2):
        StoredPositions(DataPositions(parts), part, dict.fromkeys(state)).check_checkpoint(path)

    check("sample_index", "lane_2")
    check("lane_9", part=0)  # whose position was never exchanged
    with pytest.raises(ConfigError, match=r"^NGPU: got 2, expected .* rows that it has"):
        check("sample_index", "lane_2", "lane_3")
    with pytest.raises(ConfigError, match=r"group_size: got 3, expected 2 as in"):
        check("lane_2", parts=3)
