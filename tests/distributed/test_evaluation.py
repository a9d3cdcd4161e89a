# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Evaluation on several ranks against losses worked out in one process, in fp64."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.distributed.evaluation_cases import WINDOW, evaluate_all, options_of, write_run
from tests.reference.validation_loss import sequence_losses, token_losses, windows
from tests.support.model_weights import ModelWeights
from tests.support.rank_pool import RankPool
from torchtitan_lr.data.tokenizer import Tokenizer as Ours
from torchtitan_lr.hf.export import export_factored, export_hf
from torchtitan_lr.hf.tokenizer import export_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ASSETS = "torchtitan_lr/data/assets/bpe4k"
TEXTS = [f"def power{i}(x):\n    return x ** {i} + {7 * i} * '{'é' * i}'\n" for i in range(9)]
LANES = {"lanes": 4, "sync_fraction": 0.5, "backward_sum": "float32"}


def degrees(**values: Any) -> list[str]:
    names = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree"}
    names |= {"cp": "context_parallel_degree"}
    names |= {"replicas": "data_parallel_replicate_degree", "plan": "tp_plan"}
    return [f"--parallelism.{names.get(name, name)}={value}" for name, value in values.items()]


# Model, layout, form (a checkpoint or an export), options.
CASES: dict[str, tuple[str, list[str], str, dict[str, Any]]] = {
    "fsdp2_btp2": ("cola", degrees(tp=2, tp_comm="sequence"), "step", {}),
    "fsdp4_ragged": ("cola", [], "step", {"batch_size": 3, "seq_len": 17}),
    "fsdp4_idle_ranks": ("cola", [], "step", {"documents": 2, "batch_size": 1}),
    "vanilla4": ("svd", degrees(tp=4, plan="vanilla"), "step", {}),
    "replicas2_megatron2": ("full", degrees(tp=2, replicas=2), "step", {}),
    "caat2": ("lanes", degrees(tp=2, plan="caat"), "step", {}),
    "pp2_btp2": ("lax", degrees(tp=2, pp=2), "step", {"batch_size": 3}),
    "context2_btp2": ("cola", degrees(tp=2, cp=2, tp_comm="sequence"), "step", {"batch_size": 3}),
    "as_the_run": ("lax_pp", [], "step", {}),
    "hf_full": ("full", degrees(tp=2), "hf", {}),
    "hf_coded": ("cola", degrees(tp=2), "hf", {}),
    "factored_pp": ("lax", degrees(pp=2), "factored", {}),
    "factored_lanes": ("lanes", degrees(tp=2, plan="caat"), "factored", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint's folder and the model of each name."""
    folder = tmp_path_factory.mktemp("runs")
    sections: dict[str, dict[str, Any]] = {
        "lanes": {"caat": LANES},
        "lax_pp": {"parallelism": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}},
    }
    names = {"lanes": "full", "lax_pp": "lax"}
    return {
        name: write_run(folder / name, names.get(name, name), **sections.get(name, {}))
        for name in {case[0] for case in CASES.values()}
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def found(
    models: dict[str, Any],
    corpus: Path,
    four_ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """The results of all ranks by case."""
    cases, exports = [], tmp_path_factory.mktemp("exports")
    for name, (model, layout, form, options) in CASES.items():
        step, built = models[model]
        where = step if form == "step" else exports / name
        if form != "step":
            where.mkdir()
            write = export_hf if form == "hf" else export_factored
            write(ModelWeights(built), where, max_size="200000")
            export_tokenizer(Ours(ASSETS), Path(ASSETS), where, WINDOW)
        cases.append(options_of(where, *layout, path=str(corpus), **options))
    ranks = four_ranks.run(evaluate_all, cases)
    return dict(zip(CASES, zip(*ranks, strict=True), strict=True))


def encode(texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(f"{ASSETS}/tokenizer.json")
    begin, end = map(tokenizer.token_to_id, ("<|begin_of_text|>", "<|end_of_text|>"))
    return [[begin, *tokenizer.encode(t, add_special_tokens=False).ids, end] for t in texts]


def losses_by_window(model: Any, texts: list[str], seq_len: int) -> list[torch.Tensor]:
    stream = [token for document in encode(texts) for token in document]
    losses = []
    for start in range(0, len(stream) - 1, seq_len):
        window = torch.tensor(stream[start : start + seq_len + 1])
        with torch.no_grad():
            losses.append(token_losses(model(window[None, :-1])[0], window[1:]))
    return losses


@pytest.mark.parametrize("case", CASES)
def test_every_layout(case: str, models: dict[str, Any], found: dict[str, Any]) -> None:
    model, layout, _, options = CASES[case]
    texts = TEXTS[: options.get("documents") or None]
    losses = losses_by_window(models[model][1], texts, options.get("seq_len") or WINDOW)
    total, count = torch.cat(losses).sum().item(), sum(map(len, losses))
    size = sum(len(text.encode()) for text in texts)
    ranks = found[case]
    assert len(ranks) == 4
    for result in ranks:
        assert (result["tokens"], result["bytes"], result["ranks"]) == (count, size, 4)
        assert result["documents"] == len(texts)
        assert result["loss"] == pytest.approx(total / count, rel=1e-12)
        assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-12)
        assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-12)
    # The control: the mean of the data-parallel ranks' own means is another number.
    split = [part for part in layout if "tensor_parallel" in part or "pipeline" in part]
    split += ["pp=2"] * (case == "as_the_run")
    shares = 4 // math.prod(int(part.partition("=")[2]) for part in split)
    if shares > 1:
        own = [torch.cat(part).mean() for i in range(shares) if (part := losses[i::shares])]
        assert abs(sum(own).item() / len(own) - total / count) > 1e-6 * total / count
    assert (case == "fsdp4_idle_ranks") == (len(losses) < 4)


def test_the_windows_of_validation(
    models: dict[str, Any], corpus: Path, four_ranks: RankPool, tmp_path: Path
) -> None:
    validation = {"dataset": "local", "dataset_path": str(corpus), "seq_len": 16, "steps": -1}
    sections = {"validation": validation | {"local_batch_size": 3}}
    step, model = write_run(tmp_path / "run", "cola", **sections)
    layouts = [[], degrees(tp=2)]
    cases = [options_of(step, *layout, corpus=None, as_validated=True) for layout in layouts]
    losses = sequence_losses(model, windows(encode(TEXTS), 16))
    assert len(losses) % 4
    for results in four_ranks.run(evaluate_all, cases):
        for result in results:
            assert result["tokens"] == losses.numel() and result["bits_per_byte"] is None
            assert result["loss"] == pytest.approx(losses.mean().item(), rel=1e-12)
