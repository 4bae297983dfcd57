"""engine.load in any layout and precision: every number is the one that was saved, and training goes on alike."""

from __future__ import annotations

import pytest
import torch
from checkpoint_runs import LAYOUTS, Net, make_engine, train
from dist_harness import run_ranks
from torch import nn

TOLERANCES = {"none": 1e-5, "torch": 2e-4, "naive": 4e-4}
CHOSEN = ("one", "zero1", "fsdp", "tp2", "pp2", "tp2_fsdp2", "pp2_zero1")
STEPS = 5


def make(layout, mode, seed=0):
    return make_engine(layout, mode, model=Net(seed=seed, norm=nn.LayerNorm), samples=64, clip_grad_norm=1.0)


def whole_state(engine):
    """The model's state and the optimizer's, as they are given back."""
    model, optimizer = engine.model, engine.optimizer
    engine.close()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    names = {param: name for name, param in model.named_parameters()}
    for param, state in optimizer.state.items():
        found |= {f"{names[param]} {key}": value.clone() for key, value in state.items()}
    return found


def save_cells(rank, world_size, cells, folder):
    """For each cell what it was saved with, and the losses that follow."""
    found = {}
    for layout, mode in cells:
        engine = make(layout, mode, seed=1)
        losses = train_rest(engine, save_at=STEPS, folder=f"{folder}/{layout}_{mode}")[STEPS:]
        engine.close()
        engine = make(layout, mode)
        engine.load(f"{folder}/{layout}_{mode}")
        found[layout, mode] = losses, whole_state(engine)
    return found


def train_rest(engine, save_at=None, folder=None):
    """The losses of what is left of an epoch, in the middle of which a checkpoint may be saved."""
    losses = []
    for x, y in engine.dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) == save_at:
            engine.save(folder)
    return losses


def load_cells(rank, world_size, cells, folder):
    """For each target and source: the state that was loaded, and the losses that follow."""
    found = {}
    for (layout, mode), (source, source_mode) in cells:
        engine = make(layout, mode)
        engine.load(f"{folder}/{source}_{source_mode}")
        losses = train_rest(engine)
        engine.close()
        engine = make(layout, mode, seed=3)
        train(engine, 1)
        engine.load(f"{folder}/{source}_{source_mode}")
        found[layout, mode, source, source_mode] = losses, engine.global_step, whole_state(engine)
    return found


def on_ranks(fn, cells, layout_of, folder):
    """What `fn` gives for `cells`, by cell: of each rank, in one launch for each number of ranks."""
    found = {}
    for ranks in sorted({LAYOUTS[layout_of(cell)][0] for cell in cells}):
        mine = [cell for cell in cells if LAYOUTS[layout_of(cell)][0] == ranks]
        results = [fn(0, 1, mine, folder)] if ranks == 1 else run_ranks(fn, ranks, mine, folder, timeout=200)
        for key in results[0]:
            found[key] = [result[key] for result in results]
    return found


def mean_losses(results):
    return torch.tensor([result[0] for result in results], dtype=torch.float64).mean(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each layout and mode, with the state that was saved, and the losses that follow."""
    folder = str(tmp_path_factory.mktemp("saved"))
    cells = [(layout, mode) for layout in CHOSEN for mode in TOLERANCES]
    return folder, on_ranks(save_cells, cells, lambda cell: cell[0], folder)


def compare(saved, cells):
    """What is not as it should be, by cell."""
    folder, sources = saved
    wrong = {}
    for (layout, mode, source, source_mode), results in on_ranks(
        load_cells, cells, lambda cell: cell[0][0], folder
    ).items():
        losses, state = mean_losses(sources[source, source_mode]), sources[source, source_mode][0][1]
        found = []
        for _, step, own in results:
            found += [name for name in state if not torch.equal(own[name], state[name])] + ["step"] * (step != STEPS)
            found += sorted(own.keys() ^ state.keys())
        mine, limit = mean_losses(results), TOLERANCES[mode] + TOLERANCES[source_mode] * (mode != source_mode)
        if mine.shape != losses.shape or ((mine - losses) / losses).abs().max() > limit:
            found.append(f"losses {mine.tolist()} instead of {losses.tolist()}")
        if found:
            wrong[layout, mode, source, source_mode] = found
    return wrong


@pytest.mark.distributed
@pytest.mark.parametrize("mode", TOLERANCES)
def test_every_layout_loads_what_every_other_saved(mode, saved):
    assert compare(saved, [((target, mode), (source, mode)) for target in CHOSEN for source in CHOSEN]) == {}


@pytest.mark.distributed
def test_every_mode_loads_what_every_other_saved(saved):
    modes = [(mine, theirs) for mine in TOLERANCES for theirs in TOLERANCES if mine != theirs]
    layouts = [("one", "zero1"), ("zero1", "one"), ("fsdp", "zero1"), ("tp2_fsdp2", "pp2_zero1")]
    cells = [((target, mine), (source, theirs)) for target, source in layouts for mine, theirs in modes]
    assert compare(saved, cells) == {}
