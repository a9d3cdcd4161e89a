# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data positions, fingerprints, sums and healing of replicas that come and go."""

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.corpora import write_corpus
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.corpus import Rows
from torchtitan_lr.data.dataloader import TokenDataLoader, TrainingRows
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.replicas.state import DataPositions, digest
from torchtitan_lr.experiments.replicas.trainer import Sums

pytest.importorskip("torchft", reason="torchft is not installed (the extra `ft`)")

from torchtitan_lr.experiments.replicas import membership
from torchtitan_lr.experiments.replicas.group import LostReplicaError, check_members, gloo_group
from torchtitan_lr.experiments.replicas.membership import HealTransport, run_fingerprint

pytestmark = pytest.mark.nightly


def fingerprint(*arguments):
    module = "--job.custom_config_module=torchtitan_lr.experiments.replicas.job_config"
    config = build_job_config([module, *arguments])
    return run_fingerprint(config, {"low_rank.rank": 8}, "corpus")


def cards(*members):
    """Cards of replicas by id, commits and run."""
    names = ("id", "commits", "run")
    return [dict(zip(names, member, strict=True)) for member in members]


@pytest.mark.parametrize(
    "option", ["optimizer.tsr_rank=64", "training.seq_len=64", "fault_tolerance.group_size=4"]
)
def test_another_configuration_is_refused_by_its_key(option):
    key = option.partition("=")[0]
    other = cards((0, 0, fingerprint(f"--{option}")), (1, 3, fingerprint()))
    with pytest.raises(ConfigError, match=f"^{key}: got .*, as replica 1 has"):
        check_members(other, 0)
    with pytest.raises(LostReplicaError):  # the other one leaves
        check_members(other, 1)
    check_members(other[1:], 0)


def test_paths_and_caches_may_differ():
    own = fingerprint("--training.dataset_path=/elsewhere", "--training.gc_freq=7")
    check_members(cards((0, 0, own), (1, 0, fingerprint())), 1)


def test_one_of_two_with_the_same_id_leaves():
    twins = cards((1, 0, {}), (0, 5, {}), (1, 0, {}))
    with pytest.raises(ConfigError, match=r"^fault_tolerance\.replica_id: got 1"):
        check_members(twins, 2)
    for place in (0, 1):
        with pytest.raises(LostReplicaError):
            check_members(twins, place)
    late = cards((1, 0, {}), (1, 5, {}))
    with pytest.raises(ConfigError):
        check_members(late, 0)


def test_the_loss_is_the_mean_over_the_tokens_of_the_members():
    both = Sums([12.0, (16.0 + 2.0) / 24, 0.0, 16.0 / 8, 0.0, 2.0 / 4], 24.0)
    assert both.loss == pytest.approx(18.0 / 12)
    assert both.largest == pytest.approx(2.0)
    spoilt = Sums([12.0, math.nan, 0.0, math.nan, 0.0, 2.0 / 4], 24.0)
    assert math.isnan(spoilt.loss) and math.isnan(spoilt.largest)
    assert math.isnan(Sums([0.0, 0.0, 0.0, 0.0], 24.0).loss)


def test_a_digest_covers_every_bit():
    state = {"a": [torch.zeros(3)], "step": 1}
    assert digest(state) == digest({"step": 1, "a": [torch.zeros(3)]})
    assert digest(state) != digest({"a": [torch.tensor([0.0, 0.0, -0.0])], "step": 1})
    assert digest(state) != digest({"a": [torch.zeros(3)], "step": 2})


class Group:
    """Two members' group of gloo in this process."""

    def __init__(self, store, place):
        self.gloo, _ = gloo_group(store, place, 2, WAIT, "127.0.0.1")
        self.send, self.recv = self.gloo.send, self.gloo.recv


WAIT = timedelta(seconds=20)


def healed(state):
    """Return what the second member gets from the first."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda place: Group(store, place), range(2)))
        old, new = (HealTransport(group) for group in groups)
        sent = threads.submit(old.send_checkpoint, [1], 7, state, WAIT)
        try:
            return new.recv_checkpoint(0, old.metadata(), 7, WAIT)
        finally:
            sent.result()


def test_a_newcomer_gets_the_state(monkeypatch):
    monkeypatch.setattr(membership, "_PIECE", 100)  # several messages
    weights = torch.arange(40.0)
    state = healed({"w": weights, "step": 7})
    assert state["step"] == 7
    assert torch.equal(state["w"], weights)


class Evil:
    def __reduce__(self):
        return print, ("code of another machine",)


def test_a_state_cannot_run_code(capsys):
    with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights.only"):
        healed({"w": Evil()})
    assert capsys.readouterr().out == ""


def test_a_checkpoint_of_other_rows_or_of_another_kind_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    corpora = [write_corpus(tmp_path / f"{n}", [[list(range(n))]]) for n in (70, 80)]
    sizes = {"local_batch_size": 2, "global_batch_size": 4, "dp_world_size": 2, "dp_rank": 0}
    loaders = [TokenDataLoader(TrainingRows([Rows(corpus, 6)]), **sizes) for corpus in corpora]
    positions = DataPositions(2, (4, 2), loaders[0])
    positions.taken[1] += 1
    saved = {"dataloader": positions.state_dict()}
    path = str(tmp_path / "replicas")
    dcp.save(saved, checkpoint_id=path, no_dist=True)

    def check(parts=2, split=(4, 2), loader=loaders[0]):
        stored = DataPositions(parts, split, loader)
        return stored.check_checkpoint(path, read_metadata(path))

    assert check()
    with pytest.raises(ConfigError, match=r"^NGPU: got 2, expected .* rows that it has"):
        check(split=(4, 1))
    with pytest.raises(ConfigError, match=r"group_size: got 3, expected 2 as in"):
        check(parts=3)
    with pytest.raises(ConfigError, match=r"^training.dataset: got .* starts the data anew"):
        check(loader=loaders[1])


def listening():
    """Addresses on which this machine listens, as in /proc: bytes in reverse."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"}


def test_a_group_listens_on_its_address_alone(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none such")  # torch's own choice would fail
    assert "0300007F" not in listening()
    group, _ = gloo_group(dist.HashStore(), 0, 1, WAIT, "127.0.0.3")
    assert "0300007F" in listening()
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
