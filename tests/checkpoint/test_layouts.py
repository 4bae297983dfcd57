"""engine.load in any layout and precision: every number is the one that was saved, and training goes on alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.support.checkpoint_runs import LAYOUTS, Net, make_engine, train
from tests.support.ranks import run_ranks

TOLERANCES = {"none": 1e-5, "torch": 2e-4, "naive": 4e-4}
CHOSEN = ("one", "zero1", "fsdp", "tp2", "pp2", "tp2_fsdp2")
STEPS = 5


def make(layout, mode, seed=0, deferred=False):
    def build():
        return Net(seed=seed, norm=nn.LayerNorm)

    return make_engine(layout, mode, model=build if deferred else build(), samples=64, clip_grad_norm=1.0)


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


def differences(engine, state):
    """The names of what this rank holds that is not the `state` of the whole model at that place."""
    holding = engine._run.holding
    pieces = {f"model.{name}": piece for name, piece in holding.weights().items()} | holding.optimizer_state()[0]
    found = []
    for full_name, piece in pieces.items():
        kind, _, name = full_name.partition(".")
        key, _, param = name.partition(".")
        expected = state[name if kind == "model" else f"{param} {key}"]
        for region in piece.placement.regions:
            box = tuple(slice(at, at + size) for at, size in zip(region.at, region.sizes, strict=True))
            if not torch.equal(region.view(piece.held), expected[box]):
                found.append(full_name)
    return found + ["nothing was compared"] * (len(pieces) < 8)


def load_cells(rank, world_size, cells, folder, states):
    """For each target and source: the losses that follow a load, and what was not loaded as it was saved."""
    found = {}
    for (layout, mode), (source, source_mode) in cells:
        engine = make(layout, mode, seed=3, deferred=True)
        train(engine, 1)  # a state of its own, to be overwritten
        engine.load(f"{folder}/{source}_{source_mode}")
        wrong = differences(engine, states[source, source_mode]) + ["step"] * (engine.global_step != STEPS)
        found[layout, mode, source, source_mode] = train_rest(engine), wrong
        engine.close()
    return found


def on_ranks(fn, cells, layout_of, *args):
    """What `fn` gives for `cells`, by cell: of each rank, in one launch for each number of ranks."""
    found = {}
    for ranks in sorted({LAYOUTS[layout_of(cell)][0] for cell in cells}):
        mine = [cell for cell in cells if LAYOUTS[layout_of(cell)][0] == ranks]
        results = [fn(0, 1, mine, *args)] if ranks == 1 else run_ranks(fn, ranks, mine, *args, timeout=200)
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
    states = {source: results[0][1] for source, results in sources.items()}
    wrong = {}
    for cell, results in on_ranks(load_cells, cells, lambda cell: cell[0][0], folder, states).items():
        _, mode, *source = cell
        losses, source_mode = mean_losses(sources[tuple(source)]), source[1]
        found = [name for _, names in results for name in names]
        mine, limit = mean_losses(results), TOLERANCES[mode] + TOLERANCES[source_mode] * (mode != source_mode)
        if mine.shape != losses.shape or ((mine - losses) / losses).abs().max() > limit:
            found.append(f"losses {mine.tolist()} instead of {losses.tolist()}")
        if found:
            wrong[cell] = found
    return wrong


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_every_layout_loads_what_every_other_saved(mode, saved):
    assert compare(saved, [((target, mode), (source, mode)) for target in CHOSEN for source in CHOSEN]) == {}


@pytest.mark.distributed
def test_every_mode_loads_what_every_other_saved(saved):
    """And full precision in other layouts."""
    modes = [(mine, theirs) for mine in TOLERANCES for theirs in TOLERANCES if mine != theirs]
    layouts = [("one", "zero1"), ("fsdp", "one"), ("zero1", "fsdp")]
    cells = [((target, mine), (source, theirs)) for target, source in layouts for mine, theirs in modes]
    cells += [((target, "none"), (source, "none")) for target, source in itertools.pairwise([*CHOSEN, CHOSEN[0]])]
    assert compare(saved, cells) == {}
