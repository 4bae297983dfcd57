"""halfmesh plan: which layout is chosen, that it trains, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh import InputError, load_config
from halfmesh.compat import check
from halfmesh.plan.candidates import DEFAULT_MODES, Candidate, Mesh
from halfmesh.plan.dry_run import dry_run_with, needed
from halfmesh.plan.model_facts import find_facts
from halfmesh.plan.profiles import find_profiles
from halfmesh.plan.ranking import Row, pick
from halfmesh.plan.search import estimated, measured, search
from halfmesh.plan.show_search import lines
from halfmesh.plan.wish import Wish
from halfmesh.plan.workers import Workers
from halfmesh.plan.writing import write
from tests.support import llama
from tests.support.llama import SMALL
from tests.support.pages import read_page
from tests.support.ranks import run_ranks

KIB = 2**10
HERE = Workers(1, False)
slow = pytest.mark.slow


def find(limit, world_size, model=SMALL, **keys):
    wish = Wish(model, world_size, limit * KIB, modes=keys.pop("modes", ("naive-bf16",)), **keys)
    return wish, search(wish, HERE)


def train(rank, world_size, path, rows):
    """One update of the config, with batches of these rows. Returns whether most weights changed."""
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
        pytest.param(10000, {"strategy": "replicate", "cycle": 1}, marks=slow),
        (6000, {"strategy": "zero1", "cycle": 2}),
        pytest.param(2400, {"mesh": Mesh(1, 1, 2, 8), "cycle": 16}, marks=slow),
    ],
)
def test_less_memory_changes_the_choice_which_trains(limit, keys, tmp_path):
    wish, found = find(limit, 2, modes=("fp32",), rows=16)
    row, candidate = found.chosen, found.chosen.candidate
    assert {key: getattr(candidate, key) for key in keys} == keys
    assert row.has_room
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


@slow
def test_what_a_dry_run_refuses_is_not_listed(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(PICKY.format(rows=(1, 3)))
    monkeypatch.syspath_prepend(str(tmp_path))
    _, found = find(8000, 2, model="picky:build", rows=6, modes=("naive-bf16", "torch-bf16"))
    assert {row.candidate.mesh for row in found.listed} == {Mesh(2, 1, 1, 8)}
    assert {row.candidate.rows // row.candidate.microbatches for row in found.listed} == {2}
    assert any("raised ValueError: 3 rows" in note for note in found.notes)


def test_apex_is_for_whole_models():
    _, found = find(10000, 2, modes=("apex-fp16",))
    assert {(row.candidate.strategy, row.candidate.mesh) for row in found.listed} == {("replicate", Mesh(1, 2, 1, 8))}


def test_inputs_that_cannot_be_planned(tmp_path, monkeypatch):
    text = "from torch import nn\ndef hollow(): return nn.Sequential()\ndef bare(): return nn.Linear(2, 2)\n"
    (tmp_path / "no_models.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"Sequential has no parameters, .* return a model with weights"):
        find(8000, 1, model="no_models:hollow")
    with pytest.raises(InputError, match="give --batch, or let build return"):
        find(8000, 4, model="no_models:bare")
    with pytest.raises(InputError, match=r"--global-batch 7: .* there can be 3, 9 here; use 6 or 9"):
        find(8000, 9, rows=7)
    with pytest.raises(InputError, match="--world-size 2000000000: at most 16,384, or"):
        find(1, 2 * 10**9)


def test_the_mode_is_the_one_that_the_precision_page_recommends():
    """torch, unless it has no room, computes more again, waits longer, or sends far more to other nodes."""
    _, found = find(8000, 1, modes=DEFAULT_MODES, rows=1)
    assert found.chosen.candidate.mode == "torch-bf16"
    assert "naive-bf16" in {row.candidate.mode for row in found.listed}
    recommended = re.findall(r"^- .*?mode=\"(\w+)\"", read_page("precision.md"), re.MULTILINE)
    assert recommended[:3] == ["torch", "torch", "naive"]

    def picks(torch=(50, 0.0, 100), naive=(50, 0.0, 100), checkpoint="off"):
        kinds = (("torch-bf16", checkpoint, torch), ("naive-bf16", "off", naive))
        made = [(Candidate(mode, FOUR, "fsdp", 8, checkpoint=check), rest) for mode, check, rest in kinds]
        rows = [Row(c, memory, bubble, 0, across, 100) for c, (memory, bubble, across) in made]
        return {pick(rows).candidate.mode, pick(rows[::-1]).candidate.mode}

    assert picks() == picks(torch=(80, 0.02, 200)) == {"torch-bf16"}
    assert picks(torch=(91, 0.0, 100)) == picks(torch=(50, 0.03, 100)) == {"naive-bf16"}
    assert picks(torch=(50, 0.0, 201)) == picks(checkpoint="full") == {"naive-bf16"}


def test_advice_on_the_choice():
    wish, found = find(10000, 2, modes=("torch-bf16",))
    assert not any("advice:" in line for line in lines(found, wish))
    found.chosen = replace(found.chosen, candidate=replace(found.chosen.candidate, strategy="fsdp"))
    (advice,) = [line for line in lines(found, wish) if "advice:" in line]
    assert advice.startswith("  advice: parallel.data.param_dtype: weights are gathered in float32; ")


# --- estimates -----------------------------------------------------------------------------------------------------

KINDS = [("naive-bf16", "off"), ("torch-bf16", "full"), ("fp32", "selective")]
FOUR = Mesh(1, 4, 1, 2)
LAYOUTS = [
    {"mesh": Mesh(1, 1, 1, 2), "strategy": "replicate", "rows": 8},
    {"mesh": FOUR, "strategy": "replicate", "rows": 8, "cycle": 4},
    {"mesh": FOUR, "strategy": "zero1", "rows": 8},
    {"mesh": FOUR, "strategy": "fsdp", "rows": 8, "cycle": 2},
    {"mesh": Mesh(1, 2, 2, 2), "strategy": "fsdp", "rows": 8},
    {"mesh": Mesh(1, 1, 4, 4), "strategy": "replicate", "rows": 8},
    {"mesh": Mesh(2, 2, 1, 2), "strategy": "zero1", "rows": 16, "microbatches": 8},
    {"mesh": Mesh(2, 1, 1, 2), "strategy": "replicate", "rows": 16, "microbatches": 2, "schedule": "gpipe"},
]
PAIRS = [(KINDS[0], layout) for layout in LAYOUTS] + [(kind, LAYOUTS[place]) for kind in KINDS[1:] for place in (1, 6)]


@slow
def test_estimates_are_near_dry_runs():
    """Within a fifth of the bytes that are needed, and a tenth of those that are sent."""
    facts = find_facts(SMALL, (), [1, 2, 4], [1, 2, 4])
    profiles, problems = find_profiles(KINDS, HERE, SMALL, (), facts)
    assert problems == {}
    for kind, layout in PAIRS:
        candidate = Candidate(mode=kind[0], checkpoint=kind[1], **layout)
        said = estimated(candidate, profiles[kind], facts, 1)
        mesh = candidate.mesh
        size = mesh.pipeline * mesh.data * mesh.tensor
        run = dry_run_with(HERE, candidate.config, size, SMALL, rows=candidate.rows)
        assert run.problems == []
        real = measured(said, run)
        assert said.memory == pytest.approx(real.memory, rel=0.2), candidate
        assert said.within == pytest.approx(real.within, rel=0.1), candidate
        assert said.across == pytest.approx(real.across, rel=0.1), candidate
        assert said.bubble == real.bubble, candidate
