"""What comes back besides the numbers of plain layers: odd shapes, ties over stages, the place in the data, notes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import halfmesh
from tests.support import sharding
from tests.support.checkpoint_runs import FP16, Net, change_manifest, make_engine, train
from tests.support.models import CLASSES, FEATURES
from tests.support.ranks import RankFailure, run_ranks


def odd_shapes(rank, world_size, folder):
    """Uneven ones, single elements, channels last, a tie, two groups, state of several optimizers. What is not as it
    was, by the layouts that it was saved and loaded in."""
    wrong = {}
    for optimizer, mode in (("adamw", "naive_fp16"), ("sgd", "fp32")):
        expected = {}
        for data in ("replicate", "zero1", "fsdp"):
            engine = sharding.make_engine(data, optimizer, **sharding.MODES[mode])
            sharding.train(engine, rank, steps=3)
            engine.save(f"{folder}/{optimizer}_{data}")
            expected[data] = sharding.whole(engine)
        for source, target in itertools.product(expected, expected):
            engine = sharding.make_engine(target, optimizer, **sharding.MODES[mode])
            engine.load(f"{folder}/{optimizer}_{source}")
            # A buffer in half precision is rounded, as is what no optimizer holds.
            found = sharding.differences(sharding.whole(engine), expected[source])
            wrong |= {(optimizer, source, target, name): value for name, value in found.items() if value}
    return wrong


@pytest.mark.distributed
def test_odd_shapes(tmp_path):
    assert run_ranks(odd_shapes, 2, str(tmp_path), timeout=120) == [{}, {}]


PIPE = {"pipeline": {"size": 2, "microbatches": 2}}
TIED = {"one": {}, "pp2": PIPE, "pp2 zero1": PIPE | {"data": "zero1"}}


def tied_model(seed):
    """Its first layer and its last, under two names, are one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[4].weight = model[0].weight
    return model


def ties(rank, world_size, folder, layouts, saves):
    """Saves in each layout, or loads all of them into each, and gives back what came of it."""
    found = {}
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    for layout, source in itertools.product(layouts, ["-"] if saves else TIED):
        engine = halfmesh.initialize(
            tied_model(3 if saves else 4),
            lambda params: torch.optim.AdamW(params, lr=0.01),
            nn.functional.cross_entropy,
            config={**FP16["naive"], "parallel": TIED[layout]},
            device="cpu",
        )
        if saves:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            engine.save(f"{folder}/{layout}")
        else:
            engine.load(f"{folder}/{source}")
        model, optimizer = engine.model, engine.optimizer
        engine.close()
        names = {param: name for name, param in model.named_parameters()}
        found[layout if saves else (layout, source)] = dict(model.state_dict()) | {
            f"{names[p]} {key}": value for p, state in optimizer.state.items() for key, value in state.items()
        }
    return found


@pytest.mark.distributed
def test_weights_that_stages_share(tmp_path):
    by_ranks = {1: ["one"], 2: ["pp2"], 4: ["pp2 zero1"]}
    saved = {}
    for ranks, layouts in by_ranks.items():
        saved |= run_ranks(ties, ranks, str(tmp_path), layouts, True)[0]
    for ranks, layouts in by_ranks.items():
        for found in run_ranks(ties, ranks, str(tmp_path), layouts, False, timeout=100):
            for (layout, source), state in found.items():
                assert state.keys() == saved[source].keys(), (layout, source)
                for name, value in saved[source].items():
                    assert torch.equal(state[name], value), (layout, source, name)


class Numbered(Dataset):
    """Samples that say which they are."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((FEATURES,), float(index)), index % CLASSES


def samples_seen(rank, world_size, parallel, folder, save_at):
    """Of an epoch from its beginning up to a save, or of what is left of it after a load; and the notes of that."""
    divided = 2 if "tensor" in parallel else 1
    engine = halfmesh.initialize(
        Net(),
        lambda params: torch.optim.SGD(params, lr=1e-6),
        nn.functional.cross_entropy,
        DataLoader(Numbered(), 8 * divided // world_size, shuffle=True),
        {"parallel": parallel},
        device="cpu",
    )
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    if save_at is None:
        engine.load(folder)
        engine.save_weights(f"{folder}/weights.pt", format="torch")
        engine.load_weights(f"{folder}/weights.pt")
    seen = []
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        seen.append(sorted(x[:, 0].int().tolist()))
        if len(seen) == save_at:
            engine.save(folder)
    return seen, said


@pytest.mark.distributed
def test_the_place_in_the_data_of_other_data_ranks(tmp_path):
    """The order that two data ranks share is that of a tensor group; that of one process is not."""
    tensor = {"tensor": {"size": 2, "plan": {"up": "colwise", "down": "rowwise"}}}
    first = [seen for seen, _ in run_ranks(samples_seen, 2, {}, str(tmp_path / "dp2"), 2)]
    rest = {sample for seen in first for batch in seen[2:] for sample in batch}
    assert len(rest) == 16
    (seen, said), _ = run_ranks(samples_seen, 2, {}, str(tmp_path / "dp2"), None)
    assert seen == first[0][2:]
    assert not [words for words in said if "change during training" in words], "of a buffer that the load has written"
    (seen, said), _ = run_ranks(samples_seen, 2, tensor, str(tmp_path / "dp2"), None)
    assert {sample for batch in seen for sample in batch} == rest
    assert [len(batch) for batch in seen] == [8, 8]
    assert said[-1].endswith("\n  - it was saved in another layout: random numbers (dropout) are seeded anew")
    seen, said = samples_seen(0, 1, {}, str(tmp_path / "dp2"), None)
    assert len(seen) == 4
    assert "2 batches of epoch 0 were trained on, which is not a place in this run's order of the data" in said[-1]


def random_after_load(rank, world_size, folder):
    """Numbers that dropout would draw: after initialize, and after a load of another layout."""
    engine = make_engine("dp2", "none")
    before = torch.rand(4)
    engine.close()
    engine = make_engine("dp2", "none")  # seeds as before
    engine.load(folder)
    return before.tolist(), torch.rand(4).tolist()


@pytest.mark.distributed
def test_random_numbers_in_another_layout_are_others(tmp_path):
    engine = make_engine("one", "none")
    train(engine, 3)
    engine.save(tmp_path)
    numbers = [tuple(drawn) for both in run_ranks(random_after_load, 2, str(tmp_path)) for drawn in both]
    assert len(set(numbers)) == 4


def test_notes(tmp_path, caplog):
    """Of a checkpoint that has less than this run, from a GPU."""
    halfmesh.initialize(Net(), lambda params: torch.optim.AdamW(params), config={}, device="cpu").save(tmp_path)
    change_manifest(tmp_path / "step-00000000", device="cuda")
    engine = make_engine("one", "naive", lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with caplog.at_level(logging.INFO):
        engine.load(tmp_path)
    for words in (
        "it has 0 loss scale(s), and this run 1: they begin anew",
        "it has no learning-rate scheduler: this run's stays where it is",
        "it has no place in the data: they begin anew",
        "it was saved on another kind of device: random numbers (dropout) are seeded anew",
    ):
        assert f"\n  - {words}" in caplog.text
    assert engine.loss_scale == 256


class Counting(Net):
    """Keeps something in its state dict that is no tensor."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_and_counters(tmp_path):
    engine = make_engine("one", "torch", model=Counting())
    train(engine, 2)
    engine.model.seen = 7
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x * float("inf")), y))
    assert engine.step().skipped
    engine.save(tmp_path)
    other = make_engine("one", "torch", model=Counting())
    other.load(tmp_path)
    assert (other.model.seen, other.skipped_steps, other.global_step) == (7, 1, 3)


@pytest.mark.parametrize(("saved", "mine", "where"), [(Net, Counting, "checkpoint"), (Counting, Net, "model")])
def test_extra_state_that_only_one_has(tmp_path, saved, mine, where):
    make_engine("one", "none", model=saved(seed=1)).save(tmp_path)
    engine = make_engine("one", "none", model=mine())
    before = engine.model.head.weight.clone()
    with pytest.raises(halfmesh.errors.InputError, match=rf"the {where} has no _extra_state \(of get_extra_state\)"):
        engine.load(tmp_path)
    assert torch.equal(engine.model.head.weight, before)


class RowSums(torch.optim.Optimizer):
    """Keeps a number for each row."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["rows"] = param.grad.flatten(1).sum(1) if param.dim() > 1 else param.grad.clone()
                    self.state[param]["note"] = 3


class Keeps(torch.optim.SGD):
    """Keeps `entries` as state of each parameter, `own` as state of none."""

    entries = own = added = None

    def __init__(self, params, entries, own=None, added=None):
        super().__init__(params, lr=0.1)
        self.entries, self.own, self.added = entries, own, added

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update({key: make(param) for key, make in (self.entries or {}).items()})
        self.state.update(self.own or {})

    def state_dict(self):
        return super().state_dict() | (self.added or {})


def says(engine, folder):
    try:
        engine.save(folder)
    except halfmesh.errors.InputError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"entries": {"ema.fast": torch.zeros_like}},
            "Keeps keeps state of first.weight under 'ema.fast', which cannot",
        ),
        ({"entries": {0: torch.zeros_like}}, "Keeps keeps state of first.weight under 0, which cannot be saved"),
        ({"entries": {}, "own": {"all": {"k": 1}}}, "Keeps keeps state of no parameter, 'all', which cannot be saved"),
        ({"entries": {}, "added": {"k": 3}}, "Keeps keeps state of no parameter, 'k', which cannot be saved"),
    ],
)
def test_state_that_has_no_place(tmp_path, options, words):
    engine = make_engine("one", "none", optimizer=lambda params: Keeps(params, **options))
    train(engine, 1)
    assert words in says(engine, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_tensors_of_whole_parameters(tmp_path):
    engine = make_engine("one", "none", optimizer=lambda params: Keeps(params, {"past": lambda param: [param + 1]}))
    train(engine, 1)
    engine.save(tmp_path)
    other = make_engine("one", "none", optimizer=lambda params: Keeps(params, {}), seed=4)
    other.load(tmp_path)
    weight = other.model.first.weight
    assert torch.equal(other.optimizer.state[weight]["past"][0], engine.model.first.weight + 1)


def state_of_parts(rank, world_size, folder):
    said = []
    for name, make in (
        ("past", lambda param: [param]),
        ("norm", lambda param: float(rank)),
        ("count", lambda param: 3),
    ):
        engine = make_engine("tp2", "none", optimizer=lambda params, e={name: make}: Keeps(params, e))
        train(engine, 1)
        said.append(says(engine, folder))
    return said


@pytest.mark.distributed
def test_state_of_parts(tmp_path):
    for past, norm, count in run_ranks(state_of_parts, 2, str(tmp_path)):
        assert "Keeps keeps a list as state 'past' of up.weight, of which this rank holds a part" in past
        assert "Keeps keeps 'norm' of first.weight, which is 0.0 on one rank and 1.0 on another, so it cannot" in norm
        assert count == "saved"


def test_state_of_another_shape(tmp_path):
    """Comes back where parameters are whole, and values that are no tensors, too."""
    engine = make_engine("one", "none", optimizer=RowSums)
    train(engine, 1)
    engine.save(tmp_path)
    other = make_engine("one", "none", optimizer=RowSums)
    other.load(tmp_path)
    for ours, theirs in zip(other.optimizer.state.values(), engine.optimizer.state.values(), strict=True):
        assert torch.equal(ours["rows"], theirs["rows"])
        assert ours["note"] == 3


def killed(rank, world_size, folder, moment):
    """Rank 1 is killed at its `moment`-th use of a file of the checkpoint."""
    engine = make_engine("zero1", "none")
    engine.load(folder)
    train(engine, 1)
    left = [moment]

    def watch(event, args):
        if event == "open" and str(folder) in os.fsdecode(str(args[0])):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        sys.addaudithook(watch)
    engine.save(folder)


@pytest.mark.distributed
@pytest.mark.parametrize("moment", [0, 1, 2])
def test_one_rank_is_killed(moment, tmp_path):
    engine = make_engine("one", "none")
    train(engine, 1)
    place = engine.save(tmp_path)
    with pytest.raises(RankFailure):
        run_ranks(killed, 2, str(tmp_path), moment, timeout=20)
    assert engine.load(tmp_path) == place
    assert {path.name for path in tmp_path.iterdir()} == {place.name, ".step-00000002.tmp"}
