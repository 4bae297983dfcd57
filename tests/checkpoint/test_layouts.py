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
from tests.support.ranks import here, rank_device, run_ranks

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
        results = run_ranks(fn, ranks, mine, *args, timeout=200, init=ranks > 1)
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


@pytest.mark.sends
def test_a_checkpoint_goes_from_layout_to_layout(tmp_path):
    """Each of them loads once and is loaded once, in changing precisions; the rest is in the slow tests."""
    cells = [
        (layout, mode) for layout, mode in zip(CHOSEN[:5], ("none", "naive", "torch", "naive", "none"), strict=True)
    ]
    assert compare([*itertools.pairwise(cells), (cells[-1], cells[0])], str(tmp_path)) == {}


@pytest.mark.promise(
    "no full optimizer checkpoint under tensor parallelism",
    "lifted: each layout loads what every other saved; a second job in the folder is refused by name",
    of="SageMaker",
    page="checkpoints.md",
)
@pytest.mark.sends
@pytest.mark.slow
def test_every_layout_loads_what_every_other_saved(tmp_path):
    cells = [((target, "naive"), (source, "naive")) for target in CHOSEN for source in CHOSEN]
    assert compare(cells, str(tmp_path)) == {}


@pytest.mark.promise("no full optimizer checkpoint under tensor parallelism")
@pytest.mark.sends
@pytest.mark.slow
def test_every_mode_loads_what_every_other_saved(tmp_path):
    """And full precision in other layouts."""
    modes = [(mine, theirs) for mine in TOLERANCES for theirs in TOLERANCES if mine != theirs]
    layouts = [("one", "zero1"), ("fsdp", "one"), ("zero1", "fsdp")]
    cells = [((target, mine), (source, theirs)) for target, source in layouts for mine, theirs in modes]
    cells += [((target, "none"), (source, "none")) for target, source in itertools.pairwise([*CHOSEN, CHOSEN[0]])]
    assert compare(cells, str(tmp_path)) == {}


class Scale(nn.Module):
    """A scalar, a single element, and tensors without elements."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.1]))
        self.nothing = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.register_buffer("none", torch.empty(2, 0))

    def forward(self, x):
        return x.tanh() * self.scale + self.shift


def odd_model(seed):
    """Sizes that ranks do not divide, channels last; the first layer and the last, in other stages, share a weight."""
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
    x, y = here((torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8)))
    for layout, source in itertools.product(layouts, sources or [None]):
        engine = halfmesh.initialize(
            odd_model(4 if sources else 3),
            lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
            nn.functional.cross_entropy,
            config={**FP16["naive"], "parallel": PARALLEL[layout]},
            device=rank_device(),
        )
        if sources:
            engine.load(f"{folder}/{source}")
        else:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            engine.save(f"{folder}/{layout}")
        found[layout, source] = whole_state(engine)
    return found


@pytest.mark.sends
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


def samples_seen(rank, world_size, layout, folder, save_at=None, batch=8):
    """What two epochs give, with a save on the way; or what is left of them after a load. The dropout of the first
    batches. And the log."""
    parallel = LAYOUTS[layout][1]
    torch.manual_seed(1 if save_at else 2)
    engine = halfmesh.initialize(
        Net(dropout=0.5 if world_size > 1 else 0.0),  # in one process it draws from what the order is drawn from
        lambda params: torch.optim.SGD(params, lr=1e-6),
        nn.functional.cross_entropy,
        DataLoader(Numbered(), batch // 2 if layout == "dp2" else batch, shuffle=True),
        {"parallel": parallel},
        device=rank_device(),
    )
    masks, seen = [], []
    engine.model.drop.register_forward_hook(lambda *given: masks.append((given[2] == 0).tolist()))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    if save_at is None:
        engine.load(folder)
    for _ in range(engine.dataloader.next_epoch, 2):
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            seen.append(x[:, 0].int().tolist())
            if len(seen) == save_at:
                engine.save(folder)
    logging.getLogger("halfmesh").removeHandler(handler)
    return seen, masks[:4], said


def joined(layout, results):
    """The samples of all data ranks, as one process has them."""
    if layout != "dp2":
        return results[0][0]
    pairs = zip(results[0][0], results[1][0], strict=True)
    return [[sample for both in zip(*pair, strict=True) for sample in both] for pair in pairs]


ONE_ORDER = {"one": 1, "dp2": 2, "tp2": 2}


@pytest.mark.distributed
def test_an_epoch_goes_on_at_the_same_sample_in_every_layout(tmp_path):
    """And so does the next one, although other numbers were seeded."""

    def run(layout, *how):
        ranks = ONE_ORDER[layout]
        return run_ranks(samples_seen, ranks, layout, *how, init=ranks > 1)

    whole, dropped = None, {}
    for source in ONE_ORDER:
        results = run(source, str(tmp_path / source), 2)
        whole = whole or joined(source, results)
        assert joined(source, results) == whole
        dropped[source] = [masks for _, masks, _ in results]
    assert len(whole) == 8
    assert dropped["dp2"][0] != dropped["dp2"][1]
    for source in ONE_ORDER:
        for target in ONE_ORDER:
            results = run(target, str(tmp_path / source))
            assert joined(target, results) == whole[2:], (source, target)
            said = results[0][-1]
            assert not [words for words in said if "change during training" in words], "of a buffer that the load wrote"
            anew = "it was saved in another layout: random numbers (dropout) are reseeded" in said[-1]
            assert anew == (source != target)
            if anew and target != "one":
                repeated = [mask for masks in dropped[target] for mask in masks]
                assert not any(mask in repeated for _, masks, _ in results for mask in masks)
    seen, _, said = samples_seen(0, 1, "one", str(tmp_path / "dp2"), None, 4)
    assert (sum(seen, []), len(seen)) == (sum(whole[2:], []), 12), "smaller batches"  # noqa: RUF017
    seen, _, said = samples_seen(0, 1, "one", str(tmp_path / "dp2"), None, 5)
    assert sum(seen, []) == sum(whole[4:], [])  # noqa: RUF017 - they are few
    assert "2 batches of epoch 0 were trained on, which is no position in this run's order" in said[-1]
