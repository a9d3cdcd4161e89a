# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The losses that a run on several ranks logs, against the same losses worked by hand in fp64."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.distributed.training import small_trainer
from tests.reference.validation_loss import sequence_losses, token_losses, windows
from tests.support.parity_runs import LAYOUTS, degrees, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.training.history import HISTORY_FILE, read_history

# Ranks, data-parallel ranks among them, and arguments.
CASES = {
    "dp4": (4, 4, [*degrees(local_batch=2), "--parallelism.data_parallel_replicate_degree=2"]),
    "tp4": (4, 1, LAYOUTS["tp4"][1]),
    "pp4": (4, 1, LAYOUTS["pp4"][1]),
    "dp2_pp2": (4, 2, LAYOUTS["fsdp2_pp2"][1]),
    "dp4_pp2": (8, 4, degrees(pipeline=2, local_batch=2)),
}
SEQ_LEN, BATCH = 16, 3
TRAINED_SEQ_LEN, TRAINED_ROWS = 24, 8
FLAVOR = "debug"  # four layers, for four stages
OPTIONS = [
    *model("lax"),
    f"--model.flavor={FLAVOR}",
    f"--training.seq_len={TRAINED_SEQ_LEN}",
    f"--training.global_batch_size={TRAINED_ROWS}",
    "--validation.enable",
    "--validation.dataset=local",
    f"--validation.seq_len={SEQ_LEN}",
    f"--validation.local_batch_size={BATCH}",
]
DOCUMENTS = [f"def power{i}(x):\n    return x ** {i} + {7 * i}\n" for i in range(12)]
# Makes a fresh model's losses differ from token to token, and with them all wrong means.
SHARPER = 16.0
MARGIN = 10


def training_batch(dp_rank: int, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A rank's own sequences; fewer labels of each further rank count, of four ranks' first none.

    The first, because a maximum over ranks drops a NaN of the last ones on some backends.
    """
    generator = torch.Generator().manual_seed(dp_rank)
    tokens = torch.randint(4096, (rows, TRAINED_SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    first_of_four = dp_rank == 0 and rows == TRAINED_ROWS // 4
    valid = 0 if first_of_four else labels.numel() // (dp_rank + 1)
    labels.view(-1)[valid:] = IGNORE_INDEX
    return {"input": tokens[:, :-1].contiguous()}, labels


def log_losses(corpus: str, cases: list[list[str]]) -> list[list[dict[str, Any]]]:
    """Validate and train one step in each layout; return the records of each."""
    import torch.distributed as dist

    results = []
    for options in cases:
        path = f"--validation.dataset_path={corpus}"
        with small_trainer([*options, *OPTIONS, path]) as trainer:
            for part in trainer.model_parts:
                if part.output is not None:
                    with torch.no_grad():
                        part.output.weight.mul_(SHARPER)
            trainer.validator.validate(trainer.model_parts, 0)
            mesh = trainer.parallel_dims.get_optional_mesh("batch")
            rank = 0 if mesh is None else mesh.get_local_rank()
            job = trainer.job_config
            trainer.step = 1
            trainer.train_step(iter([training_batch(rank, job.training.local_batch_size)]))
        dist.barrier()
        results.append(read_history(Path(job.job.dump_folder) / HISTORY_FILE))
    return results


@pytest.fixture(scope="module")
def records(
    four_ranks: RankPool, eight_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The validation record and the training record of each case."""
    corpus = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    found: dict[str, Any] = {}
    for pool in (four_ranks, eight_ranks):
        cases = {name: case for name, case in CASES.items() if case[0] == pool.world_size}
        options = [options for _, _, options in cases.values()]
        found |= zip(cases, pool.run(log_losses, str(corpus), options)[0], strict=True)
    return found


@pytest.fixture(scope="module")
def reference() -> LlamaModel:
    """The fresh model that every layout starts from, in fp32."""
    built = LlamaModel(FLAVORS["lax"][FLAVOR])
    built.init_weights()
    with torch.no_grad():
        built.output.weight.mul_(SHARPER)
    return built


@pytest.fixture(scope="module")
def losses(reference: LlamaModel) -> torch.Tensor:
    """The losses of all labels of the corpus, (sequences, SEQ_LEN)."""
    tokenizer = Tokenizer.from_file("torchtitan_lr/data/assets/bpe4k/tokenizer.json")
    begin, end = map(tokenizer.token_to_id, ("<|begin_of_text|>", "<|end_of_text|>"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in DOCUMENTS]
    sequences = windows([[begin, *ids, end] for ids in encoded], SEQ_LEN)
    assert len(sequences) == 13  # four and three times three, in batches of three
    return sequence_losses(reference.double(), sequences)


@pytest.fixture(scope="module")
def limit(reference: LlamaModel) -> float:
    """MARGIN times what fp32 does to the loss of a token in one process, on this machine."""
    batch, labels = training_batch(0, 2)
    by_precision = [
        token_losses(reference.to(dtype)(batch["input"]).flatten(0, 1), labels.flatten())
        for dtype in (torch.float32, torch.float64)
    ]
    return MARGIN * (by_precision[0] - by_precision[1]).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_validation_by_hand(
    case: str, records: dict[str, Any], losses: torch.Tensor, limit: float
) -> None:
    _, ranks, _ = CASES[case]
    expected = losses.mean().item()
    logged = records[case][0]
    assert logged["validation_metrics/loss"] == pytest.approx(expected, abs=limit)
    assert logged["validation_metrics/tokens"] == losses.numel()
    # Control: the ranks' shares differ in size, and the last batch of the first is not full.
    shares = [losses[rank::ranks] for rank in range(ranks)]
    batches = [batch for share in shares for batch in share.split(BATCH)]
    per_rank = len(shares[0].split(BATCH))
    batch_means = [batch.mean().item() for batch in batches]
    for wrong in (
        sum(batch_means) / len(batches),
        expected * per_rank / (per_rank + 1),
        losses.sum().item() / (per_rank * ranks * BATCH * SEQ_LEN),
        torch.cat([share[: len(share) // BATCH * BATCH] for share in shares]).mean().item(),
        *([sum(share.mean().item() for share in shares) / ranks] if ranks > 1 else []),
    ):
        assert abs(wrong - expected) > 10 * limit


@pytest.mark.parametrize("case", CASES)
def test_logged_training_losses_by_hand(
    case: str, records: dict[str, Any], reference: LlamaModel, limit: float
) -> None:
    _, ranks, _ = CASES[case]
    of_ranks = []
    for rank in range(ranks):
        batch, labels = training_batch(rank, TRAINED_ROWS // ranks)
        with torch.no_grad():
            logits = reference.double()(batch["input"])
        valid = labels != IGNORE_INDEX
        of_ranks.append(token_losses(logits[valid], labels[valid]))
    means = [losses.mean().item() for losses in of_ranks if len(losses)]
    expected = torch.cat(of_ranks).mean().item()
    logged = records[case][1]
    assert logged["loss_metrics/global_avg_loss"] == pytest.approx(expected, abs=limit)
    assert logged["loss_metrics/global_max_loss"] == pytest.approx(max(means), abs=limit)
    # Control: no two of these are alike.
    if ranks > 1:
        for a, b in itertools.combinations([*means, expected, sum(means) / ranks], 2):
            assert abs(a - b) > 10 * limit
