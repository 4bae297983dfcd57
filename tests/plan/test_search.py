"""What is chosen, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import halfmesh
from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.errors import InputError
from halfmesh.plan.candidates import DEFAULT_MODES, Candidate, Mesh, divisors, read_modes
from halfmesh.plan.dry_run import dry_run_with, needed
from halfmesh.plan.search import search
from halfmesh.plan.show_search import as_json, lines
from halfmesh.plan.wish import Wish
from halfmesh.plan.workers import Workers
from halfmesh.plan.writing import write
from tests.support.llama import SMALL
from tests.support.ranks import run_ranks

KIB = 2**10
HERE = Workers(1, False)


def find(limit, world_size, model=SMALL, **keys):
    wish = Wish(model, world_size, limit * KIB, modes=keys.pop("modes", ("naive-bf16",)), **keys)
    return wish, search(wish, HERE)


def train(rank, world_size, path, rows):
    """One update of the config, with batches of these rows. Returns whether the weights changed."""
    import torch
    from torch import optim
    from torch.utils.data import DataLoader, TensorDataset

    from tests.support import llama

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
    ("limit", "keys"),
    [
        (10000, {"strategy": "replicate", "cycle": 1}),
        (6000, {"strategy": "zero1", "cycle": 2}),
        (2400, {"mesh": Mesh(1, 1, 2, 8), "cycle": 16}),
    ],
)
def test_less_memory_changes_the_choice_which_trains(limit, keys, tmp_path):
    wish, found = find(limit, 2, modes=("fp32",), rows=16)
    row, candidate = found.chosen, found.chosen.candidate
    assert {key: getattr(candidate, key) for key in keys} == keys
    assert row.has_room
    assert candidate.checkpoint == "off"
    path = tmp_path / "config.py"
    write(path, row, wish, found.rows)
    assert f"batches of {candidate.rows} rows" in path.read_text()
    config = load_config(path)
    assert check(config, 2) == []
    again = dry_run_with(HERE, config, 2, SMALL, rows=candidate.rows)
    assert needed(again.largest[1]) == row.memory <= limit * KIB
    done = run_ranks(train, 2, str(path), candidate.rows)
    assert all(changed for *_, changed in done)
    seen = {data_rank: rows for rows, data_rank, _ in done}
    assert len(seen) == candidate.mesh.data
    assert sum(seen.values()) == 16


@pytest.mark.parametrize(
    ("limit", "checkpoint", "has_room"), [(3900, "selective", True), (3500, "full", True), (3300, "every=2", False)]
)
def test_recomputation_where_memory_is_short(limit, checkpoint, has_room):
    _, found = find(limit, 1, modes=("fp32",))
    assert found.chosen.candidate.checkpoint == checkpoint
    assert found.chosen.has_room == has_room


def test_the_list():
    _, found = find(10000, 2, modes=DEFAULT_MODES, top=5)
    assert len(found.listed) == 5
    assert found.listed[0] is found.chosen
    tried = [row.run is not None for row in found.listed]
    assert tried == [True] * 4 + [False]
    assert found.runs == 4
    assert len({row.candidate.layout for row in found.listed}) == 5
    assert found.reason.startswith("fewer bytes in all")


def test_nothing_fits():
    _, found = find(100, 1)
    assert found.chosen is None
    assert found.runs == 1
    assert found.closest.memory > 100 * KIB
    assert found.closest.memory == needed(found.closest.run.largest[1])


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
    _, found = find(8000, 4, model="plain:build")
    assert found.chosen.candidate.mesh == Mesh(1, 4, 1, 8)
    tensor, pipeline, checkpoint = found.notes
    assert tensor.startswith("tensor stays 1: ")
    assert "no tensor plan" in tensor or "plan" in tensor
    assert pipeline.startswith("pipeline stays 1: parallel.pipeline: no partitioner knows Plain")
    assert checkpoint.startswith("activation_checkpoint is left out: ")
    assert "no repeated blocks" in checkpoint


PICKY = """
import torch
from torch import nn
class Picky(nn.Linear):
    def forward(self, x):
        if len(x) in {rows}:
            raise ValueError(f"{{len(x)}} rows")
        return super().forward(x)
def build():
    return nn.Sequential(Picky(64, 64), nn.Linear(64, 64)), torch.zeros(4, 64)
"""


def test_what_a_dry_run_refuses_is_not_listed(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(PICKY.format(rows=(1, 3)))
    monkeypatch.syspath_prepend(str(tmp_path))
    _, found = find(8000, 2, model="picky:build", rows=6, modes=("naive-bf16", "torch-bf16"))
    assert {row.candidate.mesh for row in found.listed} == {Mesh(2, 1, 1, 8)}
    assert {row.candidate.rows // row.candidate.microbatches for row in found.listed} == {2}
    refused = [note for note in found.notes if "raised ValueError: 3 rows" in note]
    assert [note.partition(",")[0] for note in refused if "dp 2 zero1" in note] == ["naive-bf16"]
    assert "dp 2 zero1, 3 rows, and what is divided and called alike: " in refused[0]


def test_nothing_can_be_run(tmp_path, monkeypatch):
    (tmp_path / "never.py").write_text(PICKY.format(rows=(1, 2, 3, 4)))
    monkeypatch.syspath_prepend(str(tmp_path))
    wish, found = find(8000, 1, model="never:build", modes=("naive-bf16", "fp32"))
    assert (found.chosen, found.closest, found.counted, found.runs) == (None, None, 0, 0)
    assert found.problems == ["--model: calling the model with [2, 64] torch.float32 raised ValueError: 2 rows"]
    first, *reasons = lines(found, wish)
    assert first.startswith("nothing of this can be run, with any memory")
    assert reasons == [f"  {found.problems[0]}"]


def test_dry_runs_that_all_fail(tmp_path, monkeypatch):
    (tmp_path / "hardly.py").write_text(PICKY.format(rows=(1, 3)))
    monkeypatch.syspath_prepend(str(tmp_path))
    _, found = find(8000, 1, model="hardly:build", rows=3)
    assert (found.chosen, found.closest, found.counted, found.runs) == (None, None, 2, 0)
    assert {problem.rpartition(": ")[2] for problem in found.problems} == {"1 rows", "3 rows"}


def test_without_parameters(tmp_path, monkeypatch):
    (tmp_path / "hollow.py").write_text("from torch import nn\ndef build(): return nn.Sequential()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"hollow:build: Sequential has no parameters, .* return a model with weights"):
        find(8000, 1, model="hollow:build")


def test_without_inputs(tmp_path, monkeypatch):
    (tmp_path / "bare.py").write_text("import llama\ndef build(): return llama.small()[0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="give --batch, or let build return"):
        find(8000, 4, model="bare:build")


def test_rows_that_cannot_be_divided():
    with pytest.raises(InputError, match=r"--global-batch 7: .* there can be 3, 9 here; use 6 or 9"):
        find(8000, 9, rows=7)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"world_size": 0}, "--world-size 0: it must be at least 1"),
        ({"node": 0}, "--gpus-per-node 0"),
        ({"rows": 0}, "--global-batch 0"),
        ({"top": 0}, "--top 0"),
        ({"world_size": 2 * 10**9}, "--world-size 2000000000: at most 16,384, or"),
        ({"rows": 2 * 10**9}, "--global-batch 2000000000: at most 16,777,216, or"),
        ({"device": "cdua"}, "--device cdua: allowed: cpu, cuda; did you mean 'cuda'"),
    ],
)
def test_what_is_no_wish(keys, words):
    with pytest.raises(InputError, match=words):
        Wish(SMALL, **({"world_size": 4, "limit": 1} | keys))


def test_divisors():
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(13) == (1, 13)
    assert len(divisors(2 * 10**9)) == 110


def test_modes():
    assert read_modes([]) == DEFAULT_MODES
    assert read_modes(["Torch-FP16", "fp32"]) == ("torch-fp16", "fp32")
    with pytest.raises(InputError, match=r"--mode naive-pf16: allowed: fp32, .*did you mean 'naive-fp16'"):
        read_modes(["naive-pf16"])


def test_apex_is_for_whole_models():
    _, found = find(10000, 2, modes=("apex-fp16",))
    assert {(row.candidate.strategy, row.candidate.mesh) for row in found.listed} == {("replicate", Mesh(1, 2, 1, 8))}


def test_no_layout_composes():
    _, found = find(10000, 2, modes=("apex-fp16",), rows=1)
    assert (found.chosen, found.counted) == (None, 0)
    (problem,) = found.problems
    assert problem.startswith("none of the layouts that divide 1 row(s) can be had with --mode apex-fp16")


def test_advice_on_the_choice():
    wish, found = find(10000, 2, modes=("torch-bf16",))
    gathered = replace(found.chosen.candidate, strategy="fsdp")
    assert not any("advice:" in line for line in lines(found, wish))
    assert as_json(found, wish)["advice"] == []
    found.chosen = replace(found.chosen, candidate=gathered)
    (advice,) = [line for line in lines(found, wish) if "advice:" in line]
    assert advice.startswith("  advice: parallel.data.param_dtype: weights are gathered in float32; ")
    assert as_json(found, wish)["advice"] == [advice.removeprefix("  advice: ")]


def test_schedules():
    config = Candidate("fp32", Mesh(2, 1, 1, 8), "replicate", 8, 1, "interleaved", 2, 4, "every=2").config
    assert config.to_dict() == {
        "parallel": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}},
        "activation_checkpoint": {"every": 2},
    }
