# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks continue prompts with the tokens of one process (fp64, greedy and sampled)."""

import json
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.commands import ROOT
from tests.oracle.generation import pass_bytes
from tests.support.parity_cases import tp_mesh
from tests.support.rank_pool import RankPool
from tests.unit.tiny import build_tiny, tiny_args, tokens
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.hf.generate_ranks import load_on_ranks
from torchtitan_lr.inference.completion import Settings, complete
from torchtitan_lr.inference.decode import Decoder, Sampling
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.generation import generation_settings, sharded_choice
from torchtitan_lr.parallel.plans import apply_tensor_parallel

GREEDY, TOP, NUCLEUS = Sampling(0), Sampling(1.0, top_k=7, top_p=0.9), Sampling(1.3, top_p=0.8)
FREE = Sampling(1.0)
LENGTHS, SEEDS, NEW = (3, 9, 6), (5, 6, 7), 7


@dataclass(frozen=True)
class Spoken:
    """A model, its plan, and how its tokens are drawn."""

    family: str
    plan: str
    degree: int = 4
    sampling: Sampling = GREEDY
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    unknown: tuple[int, ...] = ()

    def __str__(self) -> str:
        changes = [f"{k}{v}" for k, v in (self.model | self.settings).items()]
        return "-".join([self.family, self.plan, f"T{self.degree}", *changes])


LANES = {"lanes": 4, "sync_fraction": 0.5}
CASES = [
    Spoken("cola", "btp"),
    Spoken("cola", "btp", 2, TOP, model={"n_kv_heads": 2}, settings={"tp_norm": "sync"}),
    Spoken("lax", "btp", 2, model={"lax_gate": "scalar"}),
    Spoken("svd", "btp", 2, sampling=FREE, settings={"tp_comm": "sequence"}),
    Spoken("svd", "vanilla", sampling=NUCLEUS),
    Spoken("lax", "vanilla", 2, settings={"tp_grouping": False}),
    Spoken("cola", "vanilla_replicated"),
    Spoken("full", "megatron", sampling=TOP),
    Spoken("full", "megatron", 2, model={"n_kv_heads": 2}, settings={"tp_comm": "sequence"}),
    Spoken("full", "caat", model=LANES, sampling=TOP),
    Spoken("full", "caat", 2, model=LANES),
    # All tokens of the first rank, and some of the others.
    Spoken("cola", "btp", unknown=(*range(24), *range(40, 90, 2))),
    Spoken("cola", "vanilla", 2, sampling=FREE, unknown=(*range(24), *range(40, 90, 2))),
]


def build(case: Spoken) -> LlamaModel:
    model = build_tiny(case.family, torch.float64, n_layers=2, **case.model).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("gate"):
                parameter.fill_(0.7)
            elif ".w" in key:
                parameter.mul_(6)  # initial weights hardly look at earlier tokens
    return model


def decode(model: LlamaModel, case: Spoken, **options: Any) -> list[list[int]]:
    ids = tokens(model.model_args, b=len(LENGTHS), s=max(LENGTHS))
    prompts = [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]
    limits = [NEW] * len(LENGTHS)
    decoder = Decoder(
        model, prompts, limits, case.sampling, SEEDS, (), unknown=case.unknown, **options
    )
    rows: list[list[int]] = [[] for _ in prompts]
    while any(decoder.running):
        for row, token in zip(rows, decoder.step(), strict=True):
            row.append(-1 if token is None else token)
    return rows


def on_rank(cases: list[Spoken]) -> list[tuple[list[list[int]], int]]:
    """Rows of every case and the bytes of the rank's cache; on a rank."""
    found = []
    for case in cases:
        model, mesh = build(case), tp_mesh(case.degree)
        section = SimpleNamespace(tp_plan=case.plan, **case.settings)
        settings = generation_settings(section, model.model_args, case.degree)
        apply_tensor_parallel(model, mesh, settings)
        caches: list[Any] = []
        with patch.object(LlamaModel, "forward", _noting(caches)):
            rows = decode(model, case, choice=partial(sharded_choice, Ranks.of(mesh)))
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[0].layers)
        found.append((rows, held))
    return found


_forward = LlamaModel.forward


def _noting(caches: list[Any]) -> Any:
    def forward(self: LlamaModel, *args: Any, cache: Any = None) -> Any:
        caches.append(cache)
        return _forward(self, *args, cache=cache)

    return forward


def test_ranks_speak_as_one_process(four_ranks: RankPool) -> None:
    found = four_ranks.run(on_rank, CASES)
    for index, case in enumerate(CASES):
        expected = decode(build(case), case)
        for rank in range(4):
            rows, stored = found[rank][index]
            assert rows == expected, (str(case), rank)
            args = tiny_args(case.family, n_layers=2, **case.model)
            width = args.kv_dim
            if case.plan == "vanilla_replicated":  # every rank computes all heads
                width *= case.degree
            columns = max(LENGTHS) + NEW - 1
            whole = 8 * args.n_layers * len(LENGTHS) * columns * 2 * width
            assert stored * case.degree == whole, str(case)
        drawn = {token for row in expected for token in row}
        assert len(drawn) > 5 and not drawn & {*case.unknown}


def bytes_on_rank(cases: list[Spoken]) -> list[list[tuple[int, int]]]:
    """Counted and predicted bytes of the first two passes of every case; on a rank."""
    found = []
    for case in cases:
        model, mesh = build(case), tp_mesh(case.degree)
        section = SimpleNamespace(tp_plan=case.plan, **case.settings)
        settings = generation_settings(section, model.model_args, case.degree)
        apply_tensor_parallel(model, mesh, settings)
        prompts = [[1, 2, 3, 4], [5, 6, 7]]
        choice = partial(sharded_choice, Ranks.of(mesh))
        decoder = Decoder(model, prompts, [3, 3], case.sampling, (0, 1), choice=choice)
        ledger, passes = CommLedger([model], {"tp": mesh.get_group()}), []
        for new in (4, 1):
            ledger.clear()
            with ledger:
                decoder.step()
            counted = sum(row["bytes"] for row in ledger.rows() if row["mesh_dim"] == "tp")
            kept = case.sampling.top_k or 1
            shape = (model.model_args, settings, case.degree, len(prompts), new)
            passes.append((counted, pass_bytes(*shape, kept, 8)))
        found.append(passes)
    return found


def test_bytes_are_those_of_the_formula(four_ranks: RankPool) -> None:
    cases = [Spoken("cola", "btp"), Spoken("cola", "vanilla", sampling=TOP)]
    cases += [Spoken("full", "megatron", 2), Spoken("full", "caat", model=LANES, sampling=TOP)]
    for found in four_ranks.run(bytes_on_rank, cases):
        for passes in found:
            assert all(counted == predicted for counted, predicted in passes), found
            assert passes[0][0] > passes[1][0]  # four tokens per row, then one


def complete_on_rank(step: str, overrides: list[str], texts: list[str]) -> list[str]:
    """Load a rank's part of a checkpoint and continue texts; on a rank."""
    model, tokenizer, choice = load_on_ranks(Path(step), None, "cpu", overrides)
    if dist.get_world_size() > 1:
        wq = model.layers["0"].attention.wq.A.weight  # type: ignore[union-attr]
        assert wq.to_local().numel() * dist.get_world_size() == wq.numel()
    sampling = Sampling(0.8, top_k=50)
    settings = Settings(8, sampling, seed=4, batch_size=2, choice=choice)
    return [completion.text for completion in complete(model, tokenizer, texts, settings)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_read_in_parts(tmp_path: Path, two_ranks: RankPool) -> None:
    # Imported here: ranks need none of it.
    from tests.support.model_weights import ModelWeights
    from tests.support.run_folders import write_run
    from torchtitan_lr.hf.export import export_factored

    step, model = write_run(tmp_path, "cola", torch.float64)
    record = json.loads((tmp_path / "job_config.json").read_text())
    # What the run was trained with: its plan is kept, its degrees are not.
    record["parallelism"] = {"tp_plan": "vanilla", "pipeline_parallel_degree": 2}
    (tmp_path / "job_config.json").write_text(json.dumps(record))
    texts = ["import os", "def main(argv):\n    return", "x"]
    alone = complete_on_rank_alone(step, texts)
    for overrides in ([], ["--parallelism.tensor_parallel_degree=2", "--parallelism.tp_plan=btp"]):
        assert two_ranks.run(complete_on_rank, str(step), overrides, texts) == [alone, alone]
    shutil.copytree(ROOT / "torchtitan_lr/data/assets/bpe4k", tmp_path / "export")
    export_factored(ModelWeights(model), tmp_path / "export")
    assert two_ranks.run(complete_on_rank, str(tmp_path / "export"), [], texts) == [alone, alone]


def complete_on_rank_alone(step: Path, texts: list[str]) -> list[str]:
    model, tokenizer, choice = load_on_ranks(step, None, "cpu", [])
    settings = Settings(8, Sampling(0.8, top_k=50), seed=4, batch_size=2, choice=choice)
    return [completion.text for completion in complete(model, tokenizer, texts, settings)]
