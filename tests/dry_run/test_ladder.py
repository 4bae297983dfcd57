"""halfmesh plan: the first change that fits is chosen, trains, and says why those before it do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh import InputError, load_config
from halfmesh.compat import check
from halfmesh.dry_run.candidates import PlanRequest, config_text, write
from halfmesh.dry_run.dry_run import dry_runs
from halfmesh.dry_run.ladder import search_layouts
from halfmesh.dry_run.show import ladder_lines as lines
from tests.support import llama
from tests.support.llama import SMALL
from tests.support.ranks import rank_device, run_ranks

KIB = 2**10


def plan(room, world_size, model=SMALL, config=None, **keys):
    """For devices of which a rank may use `room` KiB."""
    asked = PlanRequest(load_config(config or {}), world_size, round(room * KIB / 0.9) + 2, model, **keys)
    return asked, search_layouts(asked, map, lambda changes, about: None)


def train(rank, world_size, path, rows):
    """One update of the config, with batches of these rows. Returns whether most weights changed."""
    torch.manual_seed(0)
    model, _, criterion = llama.small()
    ids = torch.randint(0, 256, (64, 32))
    loader = DataLoader(TensorDataset(ids, ids), batch_size=rows)
    engine = halfmesh.initialize(model, optim.AdamW, criterion, loader, config=path, device=rank_device())
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


@pytest.mark.promise("help in choosing a layout", "`halfmesh plan`", of="SageMaker", page="planning.md")
@pytest.mark.parametrize(
    ("room", "changes"),
    [
        (3750, "bf16.mode=torch gradient_accumulation=8"),
        pytest.param(2860, "bf16.mode=torch parallel.data.strategy=zero1", marks=pytest.mark.slow),
    ],
)
def test_the_first_that_fits_is_chosen_and_trains(room, changes, tmp_path):
    asked, ladder = plan(room, 2)
    *others, chosen = ladder.candidates
    assert chosen is ladder.chosen
    assert " ".join(chosen.changes).startswith(changes)
    assert others[0].changes == ()
    assert all(candidate.needs > asked.room for candidate in others)
    assert chosen.needs <= asked.room
    said = list(lines(ladder, asked))
    assert sum("does not fit: rank 0 " in line for line in said) == len(others)
    path = tmp_path / "config.py"
    write(path, config_text(chosen, asked, ladder.update), chosen.config)
    assert path.read_text() == "\n".join(said[said.index("") + 1 :]) + "\n"
    config = load_config(path)
    assert check(config, 2) == []
    (again,) = dry_runs(map, [(config, chosen.rows)], 2, SMALL)
    assert again.largest[1].needed == chosen.needs
    done = run_ranks(train, 2, str(path), chosen.rows)
    assert all(changed for *_, changed in done)
    assert sum({data_rank: rows for rows, data_rank, _ in done}.values()) == ladder.update.rows == 16


def test_nothing_fits():
    """What is kept is too much on each layout, however evenly it is sharded."""
    asked, ladder = plan(100, 2)
    assert ladder.chosen is None
    said = list(lines(ladder, asked))
    assert sum("keeps" in line and "between updates, without gradients" in line for line in said) == 4
    assert any(
        "parallel.tensor.size=2: a rank would need at least " in note and note.endswith("sharded everything evenly")
        for note in ladder.notes
    )
    assert said[-1].startswith("nothing fits. Use more ranks")


MODELS = """
import torch
from torch import nn
from tests.support import llama
def hollow(): return nn.Sequential(), torch.zeros(2, 2)
def bare(): return nn.Linear(2, 2)
def normed(): return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), torch.zeros(8, 64)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_what_changes_the_result_is_left_out(models):
    _, ladder = plan(1, 2, model="some_models:normed", config={"bf16": {"mode": "torch"}})
    assert {candidate.rows for candidate in ladder.candidates} == {8}
    assert "not tried: smaller batches: BatchNorm's statistics would change" in ladder.notes
    assert any(note.startswith("not tried: parallel.tensor.size=2: ") for note in ladder.notes)
    assert not any("expert" in note for note in ladder.notes), "a model without experts needs no note on them"


def test_models_that_cannot_be_planned(models):
    asked, ladder = plan(1, 1, model="some_models:hollow")
    first, *reasons = lines(ladder, asked)
    assert first.startswith("some_models:hollow cannot be simulated with the config as it is")
    assert any("empty parameter list" in reason for reason in reasons)
    with pytest.raises(InputError, match=r"inputs are not known, .*: give --batch, or return"):
        plan(1, 1, model="some_models:bare")


@pytest.mark.promise(
    "advice on batch size and data loading", "`halfmesh plan`, the throughput hook", of="PyTorch", page="planning.md"
)
def test_advice_on_the_choice():
    config = {"bf16": {"mode": "torch"}, "parallel": {"data": "fsdp"}}
    (advice,) = [line for line in lines(*reversed(plan(10000, 2, config=config))) if line.startswith("advice: ")]
    assert advice.startswith("advice: parallel.data.param_dtype: weights are gathered in float32; ")
