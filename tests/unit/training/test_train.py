# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A training step against one worked by hand in fp64, and what a run counts and logs."""

import copy
import json
import math
import re
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.reference.validation_loss import sequence_losses, token_losses, windows
from tests.support.corpora import write_corpus, write_jsonl
from tests.unit.tiny_trainer import history, microbatches, parameters, tiny_trainer
from torchtitan_lr.console.log import console
from torchtitan_lr.costs import step_traffic
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.training.verdict import NonFiniteError, Verdict, decide

LR, EPS, DECAY = 1e-2, 1e-3, 0.1
# Warm-up to the full rate over two steps, one more at it, then half-way down the cosine to 0.1.
RATES = [LR / 2, LR, LR, LR * (0.1 + 0.9 * 0.5)]
# EPS is large: Adam's first step would hardly show a wrong scale of the gradient otherwise.
RECIPE = [
    "--training.steps=4",
    "--training.global_batch_size=6",
    f"--optimizer.lr={LR}",
    f"--optimizer.eps={EPS}",
    f"--optimizer.weight_decay={DECAY}",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.decay_type=cosine",
    "--lr_scheduler.min_lr_factor=0.1",
]
# fp64: sums of some thousand numbers are exact to 1e-13.
EXACT = 1e-10

LOSS, LARGEST = "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss"


@pytest.fixture
def trainer(tmp_path):
    with tiny_trainer(tmp_path, *RECIPE, "--training.max_skipped_steps=1") as trainer:
        yield trainer


def step(trainer, batches):
    trainer.step += 1
    trainer.train_step(iter(batches))


def on_cpu(model):
    return copy.deepcopy(model).cpu()


def losses_by_hand(model, batches):
    return [
        token_losses(model(tokens["input"]).flatten(0, 1)[valid], labels.flatten()[valid])
        for tokens, labels in batches
        for valid in [labels.flatten() != IGNORE_INDEX]
    ]


def gradients_by_hand(model, batches):
    """The loss over all valid tokens of all micro-batches, and its gradient by name."""
    model = on_cpu(model)
    model.zero_grad()
    loss = torch.cat(losses_by_hand(model, batches)).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def norm_by_hand(gradients):
    return math.sqrt(sum((g**2).sum().item() for g in gradients.values()))


def first_update_by_hand(weight, gradient, rate):
    """AdamW's first step: both moments are the gradient's own after the correction of bias."""
    return weight - rate * (gradient / (gradient.abs() + EPS) + DECAY * weight)


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=EXACT, atol=EXACT * EPS, msg=name)


def test_a_formula_that_fails_takes_no_summary(trainer, tmp_path, monkeypatch, caplog):
    """The run is trained and saved, and an outside optimizer's cost may raise anything."""
    step(trainer, microbatches())

    def fail(*_):
        raise ZeroDivisionError("of a cost")

    monkeypatch.setattr(step_traffic, "sent_per_step", fail)
    trainer.metrics_processor.write_summary(1, None)
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert line.endswith(": ZeroDivisionError: of a cost")
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_step_by_hand(share, trainer):
    """Three unequal micro-batches, with clipping to a quarter of the norm and without."""
    (model,) = trainer.model_parts
    batches = microbatches()
    loss, gradients = gradients_by_hand(model, batches)
    norm = norm_by_hand(gradients)
    before = parameters(model)
    trainer.job_config.training.max_norm = share * norm
    step(trainer, batches)

    (record,) = history(trainer)
    assert record[LOSS] == pytest.approx(loss, rel=EXACT)
    assert record[LARGEST] == pytest.approx(loss, rel=EXACT)
    assert record["grad_norm"] == pytest.approx(norm, rel=EXACT)
    # torch's clipping adds 1e-6 to the norm.
    factor = min(1.0, share * norm / (norm + 1e-6))
    clipped = {name: factor * gradient for name, gradient in gradients.items()}
    assert_equal({name: p.grad.cpu() for name, p in model.named_parameters()}, clipped)
    expected = {
        name: first_update_by_hand(before[name], gradient, RATES[0])
        for name, gradient in clipped.items()
    }
    assert_equal(parameters(model), expected)
    # Control: the mean of the micro-batches' means is another number.
    means = [losses.mean().item() for losses in losses_by_hand(on_cpu(model), batches)]
    assert abs(sum(means) / 3 / loss - 1) > 1e-4


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_left_out(bad, trainer, caplog):
    (model,) = trainer.model_parts
    first, second = microbatches(1), microbatches(2)
    before = parameters(model)
    poison = model.layers["0"].feed_forward.w1.A.weight
    if bad == "loss":
        handle = model.register_forward_hook(lambda model, args, logits: logits * math.nan)
    else:
        handle = poison.register_hook(lambda gradient: gradient * math.inf)
    step(trainer, first)
    handle.remove()
    assert_equal(parameters(model), before)
    assert trainer.skipped_steps == 1
    said = "loss of rank 0 is not finite"
    if bad == "gradient":
        said = r"gradient norm is (nan|inf) \(rank 0: layers.0.feed_forward.w1.A.weight\)"
    assert re.search(f"step 1: {said}; optimizer step skipped", caplog.text)

    # The rate goes on, the moments do not.
    _, gradients = gradients_by_hand(model, second)
    trainer.job_config.training.max_norm = 2 * norm_by_hand(gradients)
    step(trainer, second)
    expected = {
        name: first_update_by_hand(before[name], gradient, RATES[1])
        for name, gradient in gradients.items()
    }
    assert_equal(parameters(model), expected)
    records = history(trainer)
    assert [record["skipped_steps"] for record in records] == [1, 1]
    assert (records[0][LOSS] is None) == (bad == "loss")

    # No more than one step may be skipped.
    model.register_forward_hook(lambda model, args, logits: logits * math.nan)
    with pytest.raises(NonFiniteError, match="step 3: loss of rank 0 is not finite"):
        step(trainer, first)
    assert_equal(parameters(model), expected)


def test_a_batch_without_labels_is_named(trainer, caplog):
    before = parameters(trainer.model_parts[0])
    nothing = microbatches(valid=(0, 0, 0))
    step(trainer, nothing)
    assert "step 1: the global batch has no valid label" in caplog.text
    assert_equal(parameters(trainer.model_parts[0]), before)
    (record,) = history(trainer)
    assert (record["skipped_steps"], record[LOSS], record[LARGEST]) == (1, None, None)
    # One label is enough, and one more batch without any is one too many.
    step(trainer, microbatches(valid=(0, 1, 0)))
    assert history(trainer)[-1][LARGEST] is not None
    with pytest.raises(NonFiniteError, match="step 3: the global batch has no valid label"):
        step(trainer, nothing)


def test_what_a_logged_step_tells(trainer):
    """Its rate, the tokens so far, and the mean of the losses since the last."""
    trainer.job_config.metrics.log_freq = 3
    losses = []
    batches = iter([batch for seed in range(4) for batch in microbatches(seed)])
    for _ in range(4):
        step(trainer, batches)
        losses.append(trainer.loss)
    records = history(trainer)
    found = {record["step"]: record["interval_loss"] for record in records}
    values = [loss.item() for loss in losses]
    # The first step, every third one and the last.
    wanted = {1: values[0], 3: sum(values[1:3]) / 2, 4: values[3]}
    assert found == pytest.approx(wanted, rel=EXACT)
    assert abs(found[3] / records[1][LOSS] - 1) > 1e-4  # the control: the last batch
    assert [record["lr"] for record in records] == pytest.approx([RATES[0], *RATES[2:]], rel=EXACT)
    # Labels that do not count are tokens all the same.
    assert [record["n_tokens_seen"] for record in records] == [48, 144, 192]


def test_what_lies_between_steps_is_not_training_time(trainer, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def passes(seconds):
        clock.now += seconds

    def loaded():
        for seed in range(4):
            for batch in microbatches(seed):
                passes(2)
                yield batch

    read = Verdict.read
    monkeypatch.setattr(Verdict, "read", lambda verdict: passes(1) or read(verdict))
    trainer.job_config.metrics.log_freq = 3
    trainer.model_parts[0].register_forward_hook(lambda *_: passes(1))
    batches = iter(loaded())
    for _ in range(3):
        step(trainer, batches)
        passes(1000)  # a validation and a save
    # The second window has two steps, the first of them not logged. Each has three micro-batches of
    # 16 tokens, computed in 1 s each, loads three of the next step in 2 s each, and waits 1 s for
    # the device.
    _, record = history(trainer)
    assert record["time_metrics/end_to_end(s)"] == 10
    assert record["throughput/tokens_per_s_per_device"] == pytest.approx(48 / 10, rel=EXACT)
    assert record["time_metrics/data_loading(%)"] == pytest.approx(60, rel=EXACT)


def test_validation_by_hand(tmp_path, caplog):
    """Seven sequences in batches of two, the last half empty; and one batch of a named set."""
    texts = [f"{n} * {n} = {n * n}" for n in range(7)]
    others = [f"{n} + {n} = {n + n}" for n in range(9)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    write_jsonl(tmp_path / "b.jsonl", others)
    (tmp_path / "sets.toml").write_text(
        '[[validation.sets]]\nname = "sums"\nsteps = 1\ndataset = "local"\n'
        'dataset_path = "${config_dir}/b.jsonl"\n'
    )
    options = ["--validation.enable", "--validation.dataset=local", "--validation.steps=-1"]
    options += [f"--validation.dataset_path={tmp_path}/a.jsonl"]
    options += ["--validation.seq_len=8", "--validation.local_batch_size=2"]
    options += [f"--job.config_file={tmp_path}/sets.toml"]
    caplog.set_level("INFO", console.name)
    with tiny_trainer(tmp_path, *RECIPE, *options) as trainer:
        (model,) = trainer.model_parts
        encode = build_tokenizer(trainer.job_config.model.hf_assets_path).encode

        rows, few = (
            windows([encode(text, add_bos=True, add_eos=True) for text in lines], 8)
            for lines in (texts, others)
        )
        losses, first = (sequence_losses(on_cpu(model), each) for each in (rows, few[:2]))
        assert len(losses) % 2 == 1
        trainer.validator.validate([model], 3)
        (record,) = history(trainer)
    found = {name.partition("/")[2]: value for name, value in record.items()}
    mean = losses.mean().item()
    assert found["loss"] == trainer.validator.last_loss == pytest.approx(mean, rel=EXACT)
    assert found["perplexity"] == pytest.approx(math.exp(mean), rel=EXACT)
    assert found["tokens"] == losses.numel() and model.training
    seen = Counter(token for row in rows for token in row[1:])
    shares = torch.tensor([*seen.values()], dtype=torch.float64) / seen.total()
    entropy = -(shares * shares.log()).sum().item()
    assert found["unigram_entropy"] == pytest.approx(entropy, rel=EXACT)
    assert found["sums/loss"] == pytest.approx(first.mean().item(), rel=EXACT)
    assert found["sums/tokens"] == first.numel() and found["sums/loss"] != found["loss"]
    said = [line.partition("  perplexity")[0] for line in caplog.messages]
    assert said[-2:] == [
        f"validation after step 3  loss {found['loss']:.5f}",
        f"validation of sums after step 3  loss {found['sums/loss']:.5f}",
    ]
    # The control: the mean of the batches' means is another number.
    assert abs(torch.stack([b.mean() for b in losses.split(2)]).mean() / mean - 1) > 1e-6


def test_a_validation_set_without_a_label_is_refused_in_one_line(tmp_path):
    """Of pairs whose answers lie behind the sequence length, say."""
    masks = [[[1] * 90], [[0] * 9] * 3]
    write_corpus(tmp_path / "corpus", [[[1] * 90]], [[[2] * 9] * 3], masks=masks)
    options = ["--training.dataset=prepared", f"--training.dataset_path={tmp_path}/corpus"]
    options += ["--validation.enable", "--validation.steps=-1", "--validation.seq_len=8"]
    options.append("--validation.local_batch_size=1")
    refused = pytest.raises(ConfigError, match=r"^validation.dataset: got .* is ignored")
    with tiny_trainer(tmp_path, *RECIPE, *options) as trainer, refused:
        trainer.validator.validate(trainer.model_parts, 3)


def test_bf16_gradients_are_clipped_as_fp64_ones():
    """Neither the norm nor the factor is rounded to bf16."""
    model = torch.nn.Linear(200, 50, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = model.weight.grad.double()
    gradients = StoredGradients([model], None)
    norm = gradients.finish_sums().sqrt()
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-12)
    gradients.clip(exact.norm().item() / 393_728, norm)  # bf16 rounds this factor by 0.24%
    scale = (model.weight.grad.double() * exact).sum() / exact.square().sum()
    assert scale.item() * 393_728 == pytest.approx(1, abs=1e-3)  # products: 6e-4


@pytest.mark.parametrize(
    ("loss", "square", "stop", "norm"),
    [
        (1.5, 9.0, False, 3.0),
        (1.5, 9.0, True, 3.0),
        (math.nan, 9.0, False, 3.0),
        (math.inf, 9.0, True, 3.0),
        (1.5, math.inf, False, math.inf),
        (1.5, 1e38, False, 1e19),
        (1.5, 1e40, False, 1e20),  # fp32 cannot hold the square
    ],
)
def test_a_verdict_of_one_process(loss, square, stop, norm):
    share, counts = torch.tensor(square, dtype=torch.float64), (float(2**53), 0.0, 1.0)
    verdict = decide(torch.tensor(loss), share, stop, counts)
    found, finite = verdict.read(), math.isfinite(loss)
    assert found.rejected is (not finite or square > 3.4e38)
    assert (found.norm, found.stop, found.next_counts) == (norm, stop, counts)
    assert (found.bad_ranks, found.loss_is_finite) == (not finite, finite)
    assert verdict.rejected.item() == float(found.rejected)
    apart = decide(torch.tensor(loss), share, stop, counts, replica=1, replicas=3)
    assert apart.read() == found and apart.norm.item() == norm
    assert verdict.rejected.dtype == torch.float32 and verdict.norm.item() == norm
