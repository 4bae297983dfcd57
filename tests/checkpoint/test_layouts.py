"""engine.load in another layout or precision: every number is the one that was saved, and training goes on alike."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import halfmesh
from tests.support.checkpoint_runs import FP16, LAYOUTS, PIPE, Net, differing, make_engine, train, whole_state
from tests.support.models import CLASSES, FEATURES
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed
TOLERANCES = {"none": 1e-5, "torch": 2e-4, "naive": 4e-4}
CHOSEN = ("one", "zero1", "fsdp", "tp2", "pp2", "tp2_fsdp2")
STEPS, ALL = 5, 8


def make(layout, mode, seed=0, deferred=False):
    def build():
        return Net(seed=seed, norm=nn.LayerNorm)

    return make_engine(layout, mode, model=build if deferred else build(), samples=64, clip_grad_norm=1.0)


def losses_of(engine, batches, **save):
    return [loss for loss, _ in train(engine, batches, **save)]


def save_cells(rank, world_size, cells, folder):
    """For each cell the losses that follow the checkpoint, and the state at the time."""
    found = {}
    for layout, mode in cells:
        engine = make(layout, mode, seed=1)
        losses = losses_of(engine, ALL, save_at=STEPS, folder=f"{folder}/{layout}_{mode}")[STEPS:]
        engine.close()
        again = make(layout, mode, seed=1)
        train(again, STEPS)
        found[layout, mode] = losses, whole_state(again)
    return found


def load_cells(rank, world_size, cells, folder, states):
    """For each target and source: the losses that follow a load, and what was not loaded as it was saved."""
    found = {}
    for target, source in cells:
        wrong = []
        for looks in (True, False):
            engine = make(*target, seed=3, deferred=True)
            train(engine, 1)  # a state of its own, to be overwritten
            engine.load(f"{folder}/{'_'.join(source)}")
            wrong += ["step"] * (engine.global_step != STEPS)
            if looks:
                wrong += differing(whole_state(engine), states[source])
        found[target, source] = losses_of(engine, ALL - STEPS), wrong
        engine.close()
    return found


def on_ranks(fn, cells, layout_of, *args):
    """What `fn` gives for `cells`, by cell: of each rank, in one call for each number of ranks."""
    found = {}
    for ranks in sorted({LAYOUTS[layout_of(cell)][0] for cell in cells}):
        mine = [cell for cell in cells if LAYOUTS[layout_of(cell)][0] == ranks]
        results = [fn(0, 1, mine, *args)] if ranks == 1 else run_ranks(fn, ranks, mine, *args, timeout=200)
        found |= {key: [result[key] for result in results] for key in results[0]}
    return found


def compare(cells, folder):
    """What is not as it should be, by cell."""
    sources = on_ranks(save_cells, sorted({source for _, source in cells}), lambda cell: cell[0], folder)
    states = {source: results[0][1] for source, results in sources.items()}
    wrong = {}
    for (target, source), results in on_ranks(load_cells, cells, lambda cell: cell[0][0], folder, states).items():
        mine, theirs = (torch.tensor([losses for losses, _ in r]).mean(0) for r in (results, sources[source]))
        limit = TOLERANCES[target[1]] + TOLERANCES[source[1]] * (target[1] != source[1])
        found = [name for _, names in results for name in names]
        if mine.shape != theirs.shape or ((mine - theirs) / theirs).abs().max() > limit:
            found.append(f"losses {mine.tolist()} instead of {theirs.tolist()}")
        if found:
            wrong[target, source] = found
    return wrong


def test_a_checkpoint_goes_from_layout_to_layout(tmp_path):
    """Each of them loads once and is loaded once, in changing precisions; the rest is in the slow tests."""
    cells = [
        (layout, mode) for layout, mode in zip(CHOSEN[:5], ("none", "naive", "torch", "naive", "none"), strict=True)
    ]
    assert compare([*itertools.pairwise(cells), (cells[-1], cells[0])], str(tmp_path)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_every_layout_loads_what_every_other_saved(mode, tmp_path):
    cells = [((target, mode), (source, mode)) for target in CHOSEN for source in CHOSEN]
    assert compare(cells, str(tmp_path)) == {}


@pytest.mark.slow
def test_every_mode_loads_what_every_other_saved(tmp_path):
    """And full precision in other layouts."""
    modes = [(mine, theirs) for mine in TOLERANCES for theirs in TOLERANCES if mine != theirs]
    layouts = [("one", "zero1"), ("fsdp", "one"), ("zero1", "fsdp")]
    cells = [((target, mine), (source, theirs)) for target, source in layouts for mine, theirs in modes]
    cells += [((target, "none"), (source, "none")) for target, source in itertools.pairwise([*CHOSEN, CHOSEN[0]])]
    assert compare(cells, str(tmp_path)) == {}


class Scale(nn.Module):
    """A scalar and a single element."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return x.tanh() * self.scale + self.shift


def odd_model(seed):
    """Sizes that ranks do not divide, channels last; its first layer and its last, in other
    stages of a pipeline, are one."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
    uneven = [nn.Linear(8, 13), nn.Unflatten(1, (1, 1, 13)), conv, nn.Flatten(), nn.Linear(26, 8)]
    model = nn.Sequential(nn.Linear(8, 8), *uneven, Scale(), nn.Linear(8, 8))
    model[-1].weight = model[0].weight
    return model


STAGES = {"pipeline": PIPE | {"partition": "auto"}}
PARALLEL = {"one": {}, "zero1": {"data": "zero1"}, "fsdp": {"data": "fsdp"}, "pp2": STAGES}
PARALLEL["pp2_zero1"] = STAGES | {"data": "zero1"}


def odd(rank, world_size, layouts, folder, sources=None):
    """Saves it in each of the layouts; or loads all `sources` into each. The states that come of it."""
    found = {}
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    for layout, source in itertools.product(layouts, sources or [None]):
        engine = halfmesh.initialize(
            odd_model(4 if sources else 3),
            lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
            nn.functional.cross_entropy,
            config={**FP16["naive"], "parallel": PARALLEL[layout]},
            device="cpu",
        )
        if sources:
            engine.load(f"{folder}/{source}")
        else:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            engine.save(f"{folder}/{layout}")
        found[layout, source] = whole_state(engine)
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        {1: ["one"], 2: ["zero1", "pp2"]},
        pytest.param({1: ["one"], 2: ["fsdp", "pp2"], 4: ["pp2_zero1"]}, marks=pytest.mark.slow),
    ],
)
def test_odd_shapes_and_weights_that_stages_share(layouts, tmp_path):
    saved = {}
    for ranks, names in layouts.items():
        saved |= run_ranks(odd, ranks, names, str(tmp_path))[0]
    sources = [layout for layout, _ in saved]
    for ranks, names in layouts.items():
        for found in run_ranks(odd, ranks, names, str(tmp_path), sources, timeout=100):
            wrong = {cell: differing(state, saved[cell[1], None]) for cell, state in found.items()}
            assert wrong == {cell: [] for cell in found}


class Numbered(Dataset):
    """Samples that say which they are."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((FEATURES,), float(index)), index % CLASSES


def samples_seen(rank, world_size, parallel, folder, save_at):
    """Of an epoch from its beginning, with a save on the way; or of what is left of it after a load. And the log."""
    engine = halfmesh.initialize(
        Net(),
        lambda params: torch.optim.SGD(params, lr=1e-6),
        nn.functional.cross_entropy,
        DataLoader(Numbered(), 8 * (2 if parallel else 1) // world_size, shuffle=True),
        {"parallel": parallel},
        device="cpu",
    )
    said, seen = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    if save_at is None:
        engine.load(folder)
    before = torch.get_rng_state()
    drawn = torch.rand(4).tolist()  # as dropout would draw
    torch.set_rng_state(before)
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        seen.append(sorted(x[:, 0].int().tolist()))
        if len(seen) == save_at:
            engine.save(folder)
    logging.getLogger("halfmesh").removeHandler(handler)
    return seen, said, drawn


def test_the_place_in_the_data_of_other_data_ranks(tmp_path):
    """The order that two data ranks share is that of a tensor group; that of one process is not."""
    tensor = {"tensor": {"size": 2, "plan": {"up": "colwise", "down": "rowwise"}}}
    start = run_ranks(samples_seen, 2, {}, str(tmp_path), 2)
    first = [seen for seen, *_ in start]
    rest = {sample for seen in first for batch in seen[2:] for sample in batch}
    assert len(rest) == 16
    (seen, said, _), _ = run_ranks(samples_seen, 2, {}, str(tmp_path), None)
    assert seen == first[0][2:]
    assert not [words for words in said if "change during training" in words], "of a buffer that the load has written"
    (seen, said, _), _ = run_ranks(samples_seen, 2, tensor, str(tmp_path), None)
    assert {sample for batch in seen for sample in batch} == rest
    assert [len(batch) for batch in seen] == [8, 8]
    assert "it was saved in another layout: random numbers (dropout) are seeded anew" in said[-1]
    samples_seen(0, 1, {}, str(tmp_path / "one"), 2)
    loaded = run_ranks(samples_seen, 2, {}, str(tmp_path / "one"), None)
    seen, said, _ = loaded[0]
    assert len(seen) == 4
    assert "2 batches of epoch 0 were trained on, which is not a place in this run's order of the data" in said[-1]
    assert len({tuple(drawn) for *_, drawn in (*start, *loaded)}) == 4, "random numbers are others, on each data rank"
