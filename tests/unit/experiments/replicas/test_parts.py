# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data positions, fingerprints, sums and healing of replicas that come and go; without torchft."""

import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.corpora import write_corpus
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.dataloader import TokenDataLoader, TrainingRows
from torchtitan_lr.data.rows import Rows
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.replicas.commits import Sums, add_commit
from torchtitan_lr.experiments.replicas.fingerprint import check_same, run_fingerprint
from torchtitan_lr.experiments.replicas.positions import DataPositions
from torchtitan_lr.experiments.replicas.state import digest
from torchtitan_lr.experiments.replicas.transport import HealTransport
from torchtitan_lr.training.guard import StepData
from torchtitan_lr.training.history import read_history

pytestmark = pytest.mark.nightly


def test_a_part_goes_on_behind_what_was_committed():
    positions = DataPositions(3, (12, 4))
    for _ in range(5):
        positions.commit([0, 2])
    assert positions.taken == [5, 0, 5]
    assert [positions.row_of(part) for part in range(3)] == [60, 0, 60]


def test_positions_survive_json_and_know_their_parts():
    positions = DataPositions(3)
    positions.commit([0, 2])
    same = DataPositions(3)
    same.load_json(positions.as_json())
    assert same.taken == [1, 0, 1]
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
    corpora = [write_corpus(tmp_path / f"{n}", [[list(range(n))]]) for n in (70, 80)]
    sizes = {"local_batch_size": 2, "global_batch_size": 4, "dp_world_size": 2, "dp_rank": 0}
    loaders = [TokenDataLoader(TrainingRows([Rows(corpus, 6)]), **sizes) for corpus in corpora]
    positions = DataPositions(2, (4, 2))
    positions.commit([1])
    saved = {"dataloader": StoredPositions(positions, loaders[0]).state_dict()}
    path = str(tmp_path / "replicas")
    dcp.save(saved, checkpoint_id=path, no_dist=True)

    def check(parts=2, split=(4, 2), loader=loaders[0]):
        stored = StoredPositions(DataPositions(parts, split), loader)
        return stored.check_checkpoint(path, read_metadata(path))

    assert check()
    with pytest.raises(ConfigError, match=r"^NGPU: got 2, expected .* rows that it has"):
        check(split=(4, 1))
    with pytest.raises(ConfigError, match=r"group_size: got 3, expected 2 as in"):
        check(parts=3)
    with pytest.raises(ConfigError, match=r"^training.dataset: got .* starts the data anew"):
        check(loader=loaders[1])
