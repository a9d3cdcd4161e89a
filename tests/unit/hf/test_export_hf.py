# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The exported model code against the model that was trained, in fp64."""

import ast
import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.support.model_weights import ModelWeights
from tests.unit.hf.hf_models import CASES, model_of
from tests.unit.tiny import tokens
from torchtitan_lr import hf
from torchtitan_lr.hf.export import HF_CODE, export_factored, export_hf

GENERATING = ["cola", "lax_gated", "lanes"]


def load(folder, dtype=torch.float64):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, torch_dtype=dtype)
    return loaded.eval()


@pytest.fixture(scope="module")
def exported(code_cache, tmp_path_factory):
    """Export a case once: our model, and the one that transformers loads."""
    done = {}

    def get(case):
        if case not in done:
            ours, folder = model_of(case), tmp_path_factory.mktemp("export") / case
            folder.mkdir()
            written = export_hf(ModelWeights(ours), folder, keep_factors=case == "svd")
            assert written == sum(p.numel() for p in ours.parameters())
            done[case] = ours, load(folder), folder
        return done[case]

    return get


def error(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def padded(ids, lengths):
    """Left-padded rows with their mask."""
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 3), mask.long()


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_ours(exported, case):
    ours, theirs, folder = exported(case)
    assert type(theirs).__module__.startswith("transformers_modules.")
    ids = tokens(ours.model_args, s=24)
    expected = ours(ids)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    out = theirs.train()(ids, labels=ids)
    theirs.eval()
    assert error(out.logits, expected) < 1e-12
    assert error(out.loss, loss) < 1e-12
    names = [name for name, _ in theirs.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in ours.named_parameters())
    gradients = torch.autograd.grad(out.loss, list(theirs.parameters()))
    there = dict(zip(names, gradients, strict=True))
    for name, gradient in zip(
        there, torch.autograd.grad(loss, [ours.get_parameter(n) for n in there]), strict=True
    ):
        assert error(there[name], gradient) < 1e-12, name
    single = load(folder, torch.float32)
    with torch.no_grad():
        assert error(single(ids).logits, copy.deepcopy(ours).float()(ids)) < 1e-6


@pytest.mark.parametrize("case", GENERATING)
def test_cached_steps_and_padded_batches_are_the_whole_sequence(exported, case):
    ours, theirs, _ = exported(case)
    ids = tokens(ours.model_args, b=3, s=20)
    with torch.no_grad():
        expected, cache, parts = ours(ids), None, []
        name = next(name for name in ("cache", "past_key_values") if name in theirs(ids))
        for piece in ids.split([7, 1, 4, 8], dim=1):  # a prompt, one token, a second turn
            out = theirs(piece, **{name: cache}, use_cache=True)
            cache = out[name]
            parts.append(out.logits)
        assert error(torch.cat(parts, dim=1), expected) < 1e-12
        rows, mask = padded(ids, [20, 13, 1])
        logits = theirs(rows, attention_mask=mask).logits
        for row, length in enumerate([20, 13, 1]):
            alone = ours(ids[row : row + 1, 20 - length :])[0]
            assert error(logits[row, 20 - length :], alone) < 1e-12
        # Angles are relative: only padding within a text shows that it has no positions.
        holes = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1, 1, 1]])
        text = ids[:1, :10][holes.bool()][None]
        within = theirs(ids[:1, :10], attention_mask=holes).logits[holes.bool()]
        assert error(within, ours(text)[0]) < 1e-12
        # The control: without the mask, padding is text.
        assert error(theirs(rows).logits[1, 7:], ours(ids[1:2, 7:])[0]) > 1e-3
        assert theirs(ids, logits_to_keep=2).logits.shape[1] == 2
    with pytest.raises(ValueError, match="attention_mask: got 5 columns"):
        theirs(ids, attention_mask=mask[:, :5])


@pytest.mark.parametrize("case", GENERATING)
def test_batches_generate_what_each_prompt_would(exported, case):
    ours, theirs, _ = exported(case)
    rows, mask = padded(tokens(ours.model_args, b=3, s=12), [12, 5, 1])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 3}
    out = theirs.generate(rows, attention_mask=mask, **options)
    for row, length in enumerate([12, 5, 1]):
        text = rows[row : row + 1, 12 - length :]
        for _ in range(8):
            with torch.no_grad():
                text = torch.cat((text, ours(text)[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(out[row, 12 - length :], text[0])
    static = {"cache_implementation": "static"}
    if case == "lax_gated":
        assert torch.equal(theirs.generate(rows, attention_mask=mask, **options, **static), out)


def test_checkpointed_blocks_have_the_same_gradients(exported):
    ours, _, folder = exported("lax_gated")
    ids, theirs = tokens(ours.model_args), load(folder)  # transformers leaves a hook on the model
    theirs.train()
    wanted = torch.autograd.grad(theirs(ids, labels=ids).loss, list(theirs.parameters()))
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    found = torch.autograd.grad(theirs(ids, labels=ids).loss, list(theirs.parameters()))
    theirs.gradient_checkpointing_disable()
    theirs.eval()
    assert max(map(error, found, wanted)) < 1e-12


def test_it_saves_itself_with_its_code(exported, tmp_path):
    ours, theirs, _ = exported("lanes")
    theirs.save_pretrained(tmp_path / "again")
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert {f"{name}.py" for name in HF_CODE} <= names
    ids = tokens(ours.model_args)
    with torch.no_grad():
        assert error(load(tmp_path / "again")(ids).logits, ours(ids)) < 1e-12


def test_the_code_needs_torch_and_transformers_only():
    own = set(HF_CODE)
    for name in HF_CODE:
        text = (Path(hf.__path__[0]) / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 or node.module in own
                roots = set() if node.level else {node.module.split(".")[0]}
            else:
                continue
            assert roots <= {"__future__", "math", "typing", "torch", "transformers"}


@pytest.mark.parametrize("case", ["lax_gated", "lanes"])
def test_the_last_hidden_state_is_what_the_head_reads(exported, case):
    ours, theirs, _ = exported(case)
    rows, mask = padded(tokens(ours.model_args, b=3, s=12), [12, 7, 3])
    with torch.no_grad():
        out = theirs(rows, attention_mask=mask, output_hidden_states=True)
        assert len(out.hidden_states) == len(theirs.layers) + 1
        assert torch.equal(theirs.output(out.hidden_states[-1]), out.logits)


@pytest.mark.nightly
@pytest.mark.parametrize("case", GENERATING)
def test_it_is_one_graph(exported, case):
    """Of padded batches too, whose mask is data; the results are those without a graph."""
    ours, theirs, _ = exported(case)
    rows, mask = padded(tokens(ours.model_args, b=2, s=8), [8, 5])
    torch._dynamo.reset()
    compiled = torch.compile(theirs, fullgraph=True, backend="aot_eager")  # raises at a break
    with torch.no_grad():
        for given in (mask, torch.ones_like(mask), None):
            wanted = theirs(rows, attention_mask=given).logits
            assert error(compiled(rows, attention_mask=given).logits, wanted) < 1e-12
    torch._dynamo.reset()


def test_adapters_train_the_factors(exported):
    import peft  # takes two seconds

    model = load(exported("lax_gated")[2])
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["A", "B"])
    adapted = peft.get_peft_model(model, config)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7 * len(model.layers)  # two matrices for A and for B
    ids = torch.arange(8)[None]
    adapted(ids, labels=ids).loss.backward()
    assert all(adapted.get_parameter(name).grad is not None for name in trained)


class Counted(ModelWeights):
    """Weights that note how many bytes are read at once."""

    def __init__(self, model):
        super().__init__(model)
        self.sizes = []

    def read(self, names):
        weights = super().read(names)
        self.sizes.append(sum(t.nbytes for t in weights.values()))
        return weights


@pytest.mark.parametrize("form", ["factored", "hf"])
def test_large_models_are_written_file_by_file(tmp_path, form):
    source = Counted(model_of("svd"))
    if form == "hf":
        export_hf(source, tmp_path, max_size=str(60_000))
    else:
        export_factored(source, tmp_path, max_size=str(60_000))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert len(source.sizes) == count > 3 and max(source.sizes) <= 60_000
    shards = {file: load_file(tmp_path / file) for file in files}
    assert {n: f for f, weights in shards.items() for n in weights} == index["weight_map"]
    weights = {name: w for shard in shards.values() for name, w in shard.items()}
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    if form == "factored":
        state = source.model.state_dict()
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[name], state[name]) for name in state)
    else:  # 1e-6: transformers has its angles and norms in fp32
        ids = tokens(source.args)
        with torch.no_grad():
            assert error(load(tmp_path)(ids).logits, source.model(ids)) < 1e-6
