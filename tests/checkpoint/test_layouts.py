"""engine.load in another layout or precision: every number is the one that was saved, and training goes on alike."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from tests.support.checkpoint_runs import LAYOUTS, PIPE, Net, differing, make_engine, train, whole_state
from tests.support.models import CLASSES, FEATURES
from tests.support.ranks import rank_device, run_ranks

pytestmark = pytest.mark.distributed
TOLERANCES = {"none": 1e-5, "torch": 2e-4, "naive": 4e-4}
STEPS, ALL = 5, 8


class Scale(nn.Module):
    """A scalar, a single element, and tensors without elements."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.1]))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("none", torch.empty(2, 0))

    def forward(self, x):
        return x.tanh() * self.scale + self.shift + self.nothing.sum()


def odd_model(seed):
    """Sizes that ranks do not divide, channels last; the first layer and the last, in other stages, share a weight."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
    uneven = [nn.Linear(8, 13), nn.Unflatten(1, (1, 1, 13)), conv, nn.Flatten(), nn.Linear(26, 8)]
    model = nn.Sequential(nn.Linear(8, 8), *uneven, Scale(), nn.Linear(8, 8))
    model[-1].weight = model[0].weight
    return model


def make(layout, mode, seed=0, deferred=False):
    """`layout` may begin with "odd ": with the odd model, and amsgrad."""
    is_odd, name = layout.startswith("odd "), layout.removeprefix("odd ")
    build = (lambda: odd_model(seed)) if is_odd else (lambda: Net(seed=seed, norm=nn.LayerNorm))
    options = {"samples": 64, "clip_grad_norm": 1.0, "model": build if deferred and not is_odd else build()}
    if is_odd:
        options["optimizer"] = lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True)
        options["parallel"] = {"pipeline": PIPE | {"partition": "auto"}} if name == "pp2" else LAYOUTS[name][1]
    return make_engine(name, mode, **options)


def save_cells(rank, world_size, cells, folder):
    """For each cell the losses that follow the checkpoint, and the state at the time."""
    found = {}
    for layout, mode in cells:
        engine, states = make(layout, mode, seed=1), []

        def look(engine=engine, states=states):
            states.append(whole_state(engine, close=False))

        losses = train(engine, ALL, STEPS, f"{folder}/{layout}_{mode}", look)[STEPS:]
        engine.close()
        found[layout, mode] = [loss for loss, _ in losses], states[0]
    return found


def load_cells(rank, world_size, cells, folder, states):
    """For each target and source: the losses that follow a load, and what was not loaded as it was saved."""
    found = {}
    for target, source in cells:
        engine = make(*target, seed=3, deferred=True)
        train(engine, 1)  # a state of its own, to be overwritten
        engine.load(f"{folder}/{'_'.join(source)}")
        wrong = ["step"] * (engine.global_step != STEPS)
        wrong += differing(whole_state(engine, close=False), states[source])
        found[target, source] = [loss for loss, _ in train(engine, ALL - STEPS)], wrong
        engine.close()
    return found


def on_ranks(fn, cells, layout_of, *args):
    """What `fn` gives for `cells`, by cell: of each rank, in one call for each number of ranks."""
    found, by_ranks = {}, {}
    for cell in cells:
        by_ranks.setdefault(LAYOUTS[layout_of(cell).removeprefix("odd ")][0], []).append(cell)
    for ranks, mine in by_ranks.items():
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


RING = [("one", "none"), ("zero1", "naive"), ("fsdp", "torch"), ("tp2", "naive"), ("pp2", "none")]
ODD = [(f"odd {layout}", "naive") for layout in ("one", "pp2", "zero1", "fsdp")]


@pytest.mark.promise(
    "loading before wrapping; no full optimizer checkpoint under tensor parallelism",
    "lifted: any layout loads any state dict or checkpoint",
    of="SageMaker",
    page="checkpoints.md",
)
@pytest.mark.sends
@pytest.mark.parametrize("ring", [RING, ODD], ids=["two ranks", "odd shapes"])
def test_a_checkpoint_goes_from_layout_to_layout(ring, tmp_path):
    """Files hold whole tensors, whoever wrote them: so each cell loads once what another saved, in a precision that
    changes on the way, and all states are compared to the bit."""
    cells = list(itertools.pairwise([*ring, ring[0]]))
    assert compare(cells, str(tmp_path)) == {}


def samples_seen(rank, world_size, layout, folder, save_at=None, batch=8):
    """The batches of two epochs, with a save on the way, or of what is left after a load; and dropout masks."""
    torch.manual_seed(1 if save_at else 2)
    data = TensorDataset(torch.arange(32.0)[:, None].expand(32, FEATURES), torch.arange(32) % CLASSES)
    engine = halfmesh.initialize(
        Net(dropout=0.5 if world_size > 1 else 0.0),  # in one process it draws from what the order is drawn from
        lambda params: torch.optim.SGD(params, lr=1e-6),
        nn.functional.cross_entropy,
        DataLoader(data, batch // 2 if layout == "dp2" else batch, shuffle=True),
        {"parallel": LAYOUTS[layout][1]},
        device=rank_device(),
    )
    masks, seen = [], []
    engine.model.drop.register_forward_hook(lambda *given: masks.append((given[2] == 0).tolist()))
    if save_at is None:
        engine.load(folder)
    for _ in range(engine.dataloader.next_epoch, 2):
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            seen.append(x[:, 0].int().tolist())
            if len(seen) == save_at:
                engine.save(folder)
    engine.close()
    return seen, masks[:4]


def in_runs(rank, world_size, runs):
    return [samples_seen(rank, world_size, *run) for run in runs]


def test_an_epoch_goes_on_at_the_same_sample_in_another_layout(tmp_path, caplog):
    """And so does the next one, although other numbers were seeded. Dropout is drawn anew, and that is said."""
    one, dp2 = str(tmp_path / "one"), str(tmp_path / "dp2")
    caplog.set_level("INFO", "halfmesh")
    whole, _ = samples_seen(0, 1, "one", one, 2)
    first, second = run_ranks(in_runs, 2, [("dp2", dp2, 2), ("dp2", one), ("tp2", dp2)])
    pairs = zip(first[1][0], second[1][0], strict=True)
    assert [[sample for both in zip(*pair, strict=True) for sample in both] for pair in pairs] == whole[2:]
    assert first[2][0] == second[2][0] == whole[2:]
    dropped = [ranks[0][1] for ranks in (first, second)]
    assert dropped[0] != dropped[1]
    assert not any(mask in dropped[0] + dropped[1] for ranks in (first, second) for mask in ranks[2][1])
    for batch, number, left in ((4, 12, whole[2:]), (5, 7, whole[4:])):
        seen, _ = samples_seen(0, 1, "one", dp2, None, batch)
        assert (sum(seen, []), len(seen)) == (sum(left, []), number)  # noqa: RUF017 - they are few
        assert "it was saved in another layout: random numbers (dropout) start from a new seed" in caplog.text
    assert "2 batches of epoch 0 are not a position in this run's order: training continues with epoch 1" in caplog.text
