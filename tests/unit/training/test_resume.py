# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Each key of a resumed run is applied, refused before any rank starts, or changes no number."""

import copy
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.nightly import nightly
from tests.unit.tiny_trainer import history, tiny_trainer
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim import entries
from torchtitan_lr.titan.components import OptimizersContainer


def momentum_sgd(model_parts, optimizer, parallel_dims):
    settings = {"lr": optimizer.lr, "momentum": 0.9}
    return OptimizersContainer(model_parts, torch.optim.SGD, settings)


def turned_tsr(model_parts, optimizer, parallel_dims):
    """TSR-Adam that climbs: its scale is negative."""
    config = replace(optimizer, name="TSRAdam", tsr_scale=-optimizer.tsr_scale)
    return entries.build_optimizers(model_parts, config, parallel_dims)


def keys(section, **values):
    return {f"{section}.{key}": value for key, value in values.items()}


BASE = {
    "training.dataset": "local",
    "training.steps": 4,
    "training.shuffle_seed": 1,
    "training.max_norm": 1e9,
    "optimizer.lr": 0.02,
    "optimizer.groups": r"""[
        {pattern = "norm", weight_decay_multiplier = 9}, {pattern = '\.B\.', lr_multiplier = 0.5}
    ]""",
    "lr_scheduler.warmup_steps": 1,
    "lr_scheduler.decay_ratio": 0.75,
}
TSR = keys("optimizer", name="TSRAdam", groups="[]", tsr_rank=2, tsr_embedding_rank=3)
TSR |= keys("optimizer", tsr_refresh_interval=4, tsr_embedding_refresh_interval=2)
# Some matrices refresh for the first time in the resumed steps.
TSR |= keys("optimizer", tsr_oversampling=1, tsr_stagger=True, tsr_start="random")
MUON = keys("optimizer", name="Muon", lr=0.01)
RECIPES = {"adam": BASE, "tsr": BASE | TSR, "muon": BASE | MUON}

ADAM = keys("optimizer", lr=0.005, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.5)
ADAM |= keys("optimizer", adamw_lr=0.05, adamw_weight_decay=0.25)
CURVE = keys("lr_scheduler", warmup_steps=4, total_steps=9, decay_ratio=0.25)
CURVE |= keys("lr_scheduler", decay_type="cosine", min_lr_factor=0.5)
GROUPS = "[{pattern = 'attention', lr_multiplier = 2}]"
OTHER_TSR = keys("optimizer", groups=GROUPS, tsr_scale=0.1, tsr_power_iterations=0)
OTHER_TSR |= keys("optimizer", tsr_oversampling=0, tsr_moments="rotate")
OTHER_MUON = keys("optimizer", momentum=0.5, nesterov=False)
OTHER_MUON |= keys("optimizer", adamw_lr=0.1, adamw_weight_decay=0.5)
APPLIED = [
    ("adam", ADAM | {"optimizer.weight_decay_on": "matrices"}),
    ("adam", {"optimizer.groups": "[]", "optimizer.name": "Adam", "training.max_norm": 0.01}),
    ("adam", CURVE),
    ("adam", {"training.steps": 9, "training.global_batch_size": 4}),
    ("adam", {"training.local_batch_size": 1, "training.mask_documents": True}),  # a batch of -1
    ("adam", dict.fromkeys(("training.dtype", "training.mixed_precision_param"), "bfloat16")),
    ("tsr", ADAM | OTHER_TSR),
    ("tsr", keys("optimizer", tsr_refresh_interval=2, tsr_embedding_refresh_interval=1)),
    ("tsr", {"optimizer.tsr_start": "gradient", "optimizer.tsr_stagger": False}),
    ("muon", OTHER_MUON),
]
"""Other values of the keys that a resumed run applies; ``--full`` changes each alone, too."""
ALONE = [(name, {key: value}) for name, changes in APPLIED for key, value in changes.items()]

TOKENIZER = Path(tempfile.mkdtemp())
"""Another file with the same tokens."""
_text = Path("torchtitan_lr/data/assets/bpe4k/tokenizer.json").read_text()
(TOKENIZER / "tokenizer.json").write_text(f"{_text} ")

REFUSED = {
    "adam": {
        "optimizer.name": ["TSRAdam", "Muon"],
        **keys("model", name="llama_cola", flavor="tiny", vocab_size=8192),
        "model.hf_assets_path": TOKENIZER,
        **keys("low_rank", rank=3, rank_attention=3, rank_ffn=3, activation="none"),
        **keys("training", text_column="other", seq_len=4, shuffle_seed=2),
    },
    "tsr": {
        "optimizer.name": ["AdamW", "Spectron"],
        **keys("optimizer", tsr_rank=1, tsr_embedding_rank=2),
        **keys("optimizer", tsr_projection="one_sided", tsr_compress_head=True),
    },
    "muon": {"optimizer.name": ["LoRAMuon", "Spectron", "AdamW", "TSRAdam"]},
}
"""Another value of each key with which a run is not resumed, or several."""


def trainer_of(folder, recipe, **changes):
    values = {**recipe, **changes}
    tables = Path(tempfile.mkdtemp()) / "groups.toml"  # a command line has no tables
    tables.write_text(f"optimizer.groups = {values.pop('optimizer.groups')}")
    options = [f"--{key}={value}" for key, value in values.items()]
    return tiny_trainer(folder, f"--job.config_file={tables}", *options, exact=False)


def states_of(trainer):
    """The optimizers' states, in the order of the parameters."""
    by_parameter = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            by_parameter |= {p: optimizer.state[p] for p in group["params"]}
    return [by_parameter[p] for p in trainer.model_parts[0].parameters()]


def two_steps(trainer):
    """Train two steps; return the weights after them and the rates that were logged."""
    batches = iter(trainer.dataloader)
    for _ in range(2):
        trainer.step += 1
        trainer.train_step(batches)
    weights = [local_part(p).detach().clone() for p in trainer.model_parts[0].parameters()]
    return weights, [record["lr"] for record in history(trainer)][-2:]


@cache
def stopped(name):
    """A run of two steps: its recipe, its folder, and a copy of what it has learned."""
    folder = Path(tempfile.mkdtemp())
    texts = folder / "short.jsonl"  # several documents in a row of 8 tokens
    records = [{"text": f"{n}={n * 5}", "other": f"{n}"} for n in range(500)]
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = RECIPES[name] | {"training.dataset_path": texts, "checkpoint.enable": True}
    with trainer_of(folder, recipe) as trainer:
        weights, _ = two_steps(trainer)
        trainer.write_record()
        trainer.checkpointer.save(2, last_step=True)
        states = states_of(trainer)
        return recipe, folder, copy.deepcopy((weights, states))


def resumed(name, changes):
    recipe, folder, _ = stopped(name)
    with trainer_of(folder, recipe, **changes) as trainer:
        assert trainer.checkpointer.load(2)
        return two_steps(trainer)


@cache
def unchanged(name):
    return resumed(name, {})


def own_training(name, changes):
    """The same of a run that has the values from its start, and is given what the other learned."""
    recipe, folder, (weights, states) = stopped(name)
    with trainer_of(folder / "own", recipe, **changes) as trainer:
        parameters, own_states = trainer.model_parts[0].parameters(), states_of(trainer)
        for parameter, weight, own, saved in zip(
            parameters, weights, own_states, states, strict=True
        ):
            local_part(parameter.detach()).copy_(weight)
            for part, value in saved.items():
                if part in own:  # TSR-Adam has all its state from the start
                    local_part(own[part]).copy_(local_part(value))
                else:
                    dtype = torch.float32 if part == "step" else parameter.dtype
                    own[part] = local_part(value).to(dtype, copy=True)
        trainer.lr_schedulers.step()
        trainer.lr_schedulers.step()
        trainer.dataloader.seek(4)  # two steps of two rows
        trainer.step = 2
        return two_steps(trainer)


def same(run, other):
    return run[1] == other[1] and all(map(torch.equal, run[0], other[0]))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("name", "changes"), [*APPLIED, *nightly(*ALONE)])
def test_applied(name, changes):
    found = resumed(name, changes)
    assert same(found, own_training(name, changes))
    assert not same(found, unchanged(name))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    recipe, folder, _ = stopped(name)
    values = {k: v if isinstance(v, list) else [v] for k, v in REFUSED[name].items()}
    for key, value in ((key, value) for key, several in values.items() for value in several):
        with pytest.raises(ConfigError) as error, trainer_of(folder, recipe, **{key: value}):
            pass
        blamed = {"training.text_column": "training.dataset"}.get(key, key)
        effective = {"low_rank.rank": "low_rank.rank_attention", "model.flavor": "model.dim"}
        blamed = effective.get(blamed, blamed)
        assert str(error.value).startswith(f"{blamed}: got "), key
        assert " as in " in str(error.value) and "--job.dump_folder=" in str(error.value)


def test_a_state_is_left_out_of_the_named_step(tmp_path):
    """A restart, or the same command without the step, loads all that was saved since."""
    recipe, folder, _ = stopped("adam")
    run = shutil.copytree(folder, tmp_path / "run")
    more = {"checkpoint.exclude_from_loading": "optimizer", "training.steps": 9}
    with trainer_of(run, recipe, **more, **{"checkpoint.load_step": 2}) as trainer:
        trainer.checkpointer.load(2)
        trainer.write_record()
        (entry,) = trainer.checkpointer.run["changes"]
        assert entry["checkpoint.exclude_from_loading"] == [[], ["optimizer"]]
        two_steps(trainer)
        trainer.checkpointer.save(4, last_step=True)
        expected = two_steps(trainer)
    with trainer_of(run, recipe, **more) as trainer:
        trainer.checkpointer.load()
        assert same(two_steps(trainer), expected)
    way = "--checkpoint.exclude_from_loading=optimizer --checkpoint.load_step=4 goes on"
    with pytest.raises(ConfigError, match=way):
        trainer_of(run, recipe, **more, **{"optimizer.name": "TSRAdam"}).__enter__()
    for name in ("model", "train_state"):
        more["checkpoint.exclude_from_loading"] = name
        with pytest.raises(ConfigError, match=f"^checkpoint.exclude_from_loading: got '{name}'"):
            trainer_of(run, recipe, **more).__enter__()
    # It would go back to the weights of step 2 and count from 0.
    more |= {"checkpoint.initial_load_path": f"{run}/checkpoint/step-2", "checkpoint.load_step": 2}
    with pytest.raises(ConfigError, match=r"got 'train_state', expected other .* own step 2; "):
        trainer_of(run, recipe, **more).__enter__()


def test_other_data_start_anew_where_the_position_is_left_out(tmp_path):
    recipe, folder, _ = stopped("adam")
    run = shutil.copytree(folder, tmp_path / "run")
    other = {"training.seq_len": 4, "training.steps": 9}
    with pytest.raises(ConfigError, match="exclude_from_loading=dataloader") as error:
        trainer_of(run, recipe, **other).__enter__()
    assert str(error.value).startswith("training.seq_len: got 4, expected 8 as in ")
    way = {"checkpoint.exclude_from_loading": "dataloader", "checkpoint.load_step": 2}
    with trainer_of(run, recipe, **other, **way) as trainer:
        trainer.checkpointer.load(2)
        assert (trainer.step, trainer.dataloader.position) == (2, 0)
        assert trainer.write_record()
        (entry,) = trainer.checkpointer.run["changes"]
        assert entry["training.seq_len"] == [8, 4] and entry["after_step"] == 2
        two_steps(trainer)


def test_a_checkpoint_of_the_model_alone_is_not_resumed(tmp_path):
    recipe, folder, _ = stopped("adam")
    run = shutil.copytree(folder, tmp_path / "run")
    with trainer_of(run, recipe, **{"checkpoint.last_save_model_only": True}) as trainer:
        trainer.checkpointer.load()
        two_steps(trainer)
        trainer.checkpointer.save(4, last_step=True)
    with trainer_of(run, recipe):  # nothing is left to train
        pass
    step, steps = f"{run}/checkpoint/step-4", {"training.steps": 9}
    with pytest.raises(ConfigError) as error:
        trainer_of(run, recipe, **steps).__enter__()
    line = f"checkpoint: got '{step}', expected one with train_state: it holds model; "
    assert str(error.value).startswith(line)
    assert f"checkpoint.initial_load_path = '{step}' starts a run" in str(error.value)
    assert "; checkpoint.load_step = 2 goes back" in str(error.value)
    assert str(error.value).endswith(f"--job.dump_folder={run}-2")
    with trainer_of(run, recipe, **steps, **{"checkpoint.load_step": 2}) as trainer:
        assert trainer.checkpointer.load(2) and trainer.step == 2


@pytest.fixture
def outside(monkeypatch):
    """Optimizers from outside the package: one with a state of its own, and a changed TSR-Adam."""
    names = {"MomentumSGD", "TSR-turned"}
    for name in names:
        monkeypatch.setitem(RECIPES, name, BASE | TSR | {"optimizer.name": name})
    entries.register_optimizer(entries.OptimizerEntry("MomentumSGD", momentum_sgd))
    entries.register_optimizer(entries.variant("TSRAdam", "TSR-turned", turned_tsr))
    yield
    for name in names:
        del entries.ENTRIES[name]


@pytest.mark.parametrize(("name", "other"), [("MomentumSGD", "TSRAdam"), ("TSR-turned", "AdamW")])
def test_an_optimizer_from_outside_goes_on(name, other, outside):
    found = resumed(name, {})
    assert same(found, own_training(name, {}))
    # The control: the state counts, and the other optimizer has another one.
    excluded = resumed(name, {"checkpoint.exclude_from_loading": "optimizer"})
    assert not same(excluded, found)
    with pytest.raises(ConfigError, match=f"^optimizer.name: got '{other}'"):
        recipe, folder, _ = stopped(name)
        with trainer_of(folder, recipe, **{"optimizer.name": other}):
            pass
