"""What is chosen, and what is refused."""

from __future__ import annotations

import pytest
from dist_harness import run_ranks

import halfmesh
from halfmesh.errors import InputError
from halfmesh.plan.candidates import DEFAULT_MODES, Candidate, Mesh, read_modes
from halfmesh.plan.dry_run import dry_run, needed
from halfmesh.plan.search import search
from halfmesh.plan.wish import Wish
from halfmesh.plan.workers import Workers
from halfmesh.plan.writing import write

KIB = 2**10
HERE = Workers(1, False)


def find(limit, world_size=4, model="llama:small", **keys):
    wish = Wish(model, world_size, limit * KIB, modes=keys.pop("modes", ("naive-bf16",)), **keys)
    return wish, search(wish, HERE)


def train(rank, world_size, path, rows):
    """One update of the config, with batches of these rows. Returns whether the weights changed."""
    import llama
    import torch
    from torch import optim
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model, _, criterion = llama.small()
    ids = torch.randint(0, 256, (64, 32))
    loader = DataLoader(TensorDataset(ids, ids), batch_size=rows)
    engine = halfmesh.initialize(model, optim.AdamW, criterion, loader, config=path, device="cpu")
    before = [p.detach().clone() for p in engine.model.parameters()]
    seen = 0
    for inputs, targets in engine.dataloader:
        seen += len(inputs)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(inputs), targets))
        if engine.step() is not None:
            break
    changed = sum(not torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    return seen, engine.context.dp_rank, changed > len(before) / 2


@pytest.mark.parametrize(
    ("limit", "modes", "keys"),
    [
        (8000, ("naive-bf16",), {"strategy": "zero1", "cycle": 1}),  # which sends fewer bytes than replicate in bf16
        (8000, ("fp32",), {"strategy": "replicate", "cycle": 1}),
        (6500, ("fp32",), {"strategy": "zero1", "cycle": 1}),
        (3800, ("fp32",), {"strategy": "zero1", "checkpoint": "off"}),
    ],
)
def test_less_memory_changes_the_choice(limit, modes, keys):
    _, found = find(limit, modes=modes)
    candidate = found.chosen.candidate
    assert {key: getattr(candidate, key) for key in keys} == keys
    run = dry_run(candidate.config, 4, "llama:small", (f"{candidate.rows},32:int64",))
    assert needed(run.largest[1]) == found.chosen.memory <= limit * KIB
    assert candidate.mesh.data * candidate.rows * candidate.cycle == found.rows == 32


@pytest.mark.parametrize(("limit", "rows"), [(8000, 64), (1300, 32)])
def test_the_config_that_is_written_trains_a_step(limit, rows, tmp_path):
    """On the second limit the weights are divided, too."""
    wish, found = find(limit, rows=rows)
    path = tmp_path / "config.py"
    write(path, found.chosen, wish, found.rows)
    done = run_ranks(train, 4, str(path), found.chosen.candidate.rows)
    assert all(changed for *_, changed in done)
    seen = {data_rank: rows for rows, data_rank, _ in done}
    assert len(seen) == found.chosen.candidate.mesh.data
    assert sum(seen.values()) == rows


def test_the_list():
    _, found = find(8000, modes=DEFAULT_MODES, top=5)
    assert len(found.listed) == 5
    assert found.listed[0] is found.chosen
    tried = [row.run is not None for row in found.listed]
    assert tried == sorted(tried, reverse=True)
    assert len({row.candidate.layout for row in found.listed}) == 5
    assert found.reason.startswith("fewer bytes in all")


def test_nothing_fits():
    _, found = find(100)
    assert found.chosen is None
    assert found.closest.run is not None
    assert found.closest.memory > 100 * KIB
    assert found.closest.memory == needed(found.closest.run.largest[1])
    assert found.closest.candidate.checkpoint == "full"


def test_a_model_that_cannot_be_divided(tmp_path, monkeypatch):
    text = """
import torch
from torch import nn
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(64, 64)
    def forward(self, x):
        return self.one(x)
def build():
    return Plain(), torch.zeros(4, 64)
"""
    (tmp_path / "plain.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, found = find(8000, model="plain:build")
    assert found.chosen.candidate.mesh == Mesh(1, 4, 1, 8)
    tensor, pipeline, checkpoint = found.notes
    assert tensor.startswith("tensor stays 1: ")
    assert "no tensor plan" in tensor or "plan" in tensor
    assert pipeline.startswith("pipeline stays 1: parallel.pipeline: no partitioner knows Plain")
    assert checkpoint.startswith("activation_checkpoint is left out: ")
    assert "no repeated blocks" in checkpoint


def test_without_inputs(tmp_path, monkeypatch):
    (tmp_path / "bare.py").write_text("import llama\ndef build(): return llama.small()[0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="give --batch, or let build return"):
        find(8000, model="bare:build")


def test_rows_that_cannot_be_divided():
    with pytest.raises(InputError, match="--global-batch 7: .* there can be 3, 9 here; use 6 or 9"):
        find(8000, world_size=9, rows=7)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"world_size": 0}, "--world-size 0: it must be at least 1"),
        ({"node": 0}, "--gpus-per-node 0"),
        ({"rows": 0}, "--global-batch 0"),
        ({"top": 0}, "--top 0"),
        ({"device": "cdua"}, "--device cdua: allowed: cpu, cuda; did you mean 'cuda'"),
    ],
)
def test_what_is_no_wish(keys, words):
    with pytest.raises(InputError, match=words):
        Wish("llama:small", **({"world_size": 4, "limit": 1} | keys))


def test_modes():
    assert read_modes([]) == DEFAULT_MODES
    assert read_modes(["Torch-FP16", "fp32"]) == ("torch-fp16", "fp32")
    with pytest.raises(InputError, match="--mode naive-pf16: allowed: fp32, .*did you mean 'naive-fp16'"):
        read_modes(["naive-pf16"])


def test_apex_is_for_whole_models():
    _, found = find(8000, modes=("apex-fp16",))
    assert all(row.candidate.strategy == "replicate" and row.candidate.mesh.data == 4 for row in found.listed)


def test_schedules():
    config = Candidate("fp32", Mesh(2, 1, 1, 8), "replicate", 8, 1, "interleaved", 2, 4, "every=2").config
    assert config.to_dict() == {
        "parallel": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}},
        "activation_checkpoint": {"every": 2},
    }
