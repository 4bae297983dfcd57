"""What a checkpoint holds besides weights: counters, groups and state of optimizers, extra and attached state."""

import numpy as np
import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.checkpoint.storage import read_manifest
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import Net, change_manifest, differing, make_engine, make_small, train, weights
from tests.support.models import said
from tests.support.ranks import run_ranks


def halved(optimizer):
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_what_a_checkpoint_lacks_is_told_and_constants_are_saved_as_text(tmp_path, caplog):
    """It was saved without precision, scheduler and loader, on a GPU."""
    config = {"ACTIVATION": halved, "NESTED": {"a": [{(1, 2): nn.ReLU}]}}
    place = halfmesh.initialize(Net(), optim.AdamW, config=config, device="cpu").save(tmp_path)
    saved = read_manifest(place)["config"]
    assert saved["ACTIVATION"] == "<function halved>"  # without its address
    assert saved["NESTED"] == {"a": [{"(1, 2)": str(nn.ReLU)}]}
    change_manifest(place, device="cuda")
    engine = make_engine("one", "naive", lr_scheduler=lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 1))
    with caplog.at_level("INFO"):
        engine.load(tmp_path)
    for words in (
        "it has 0 loss scales, but this run has 1: loss scales start from the config",
        "it has no learning-rate scheduler: this run's scheduler keeps its own state",
        "it has no position in the data: the data starts from the beginning",
        "it was saved on another kind of device: random numbers (dropout) start from a new seed",
    ):
        assert words in caplog.text
    assert engine.loss_scale == 256


class Counting(Net):
    """Keeps something in its state dict that is no tensor."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_and_counters(tmp_path):
    engine, other = (make_engine("one", "torch", model=Counting()) for _ in range(2))
    train(engine, 2)
    engine.model.seen = 7
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x * float("inf")), y))
    assert engine.step().skipped
    engine.save(tmp_path)
    other.load(tmp_path)
    assert (other.model.seen, other.skipped_steps, other.global_step) == (7, 1, 3)


class Keeps(optim.SGD):
    """Keeps `entries` as state of each parameter, `own` as state of none."""

    entries, own = {}, {}

    def __init__(self, params, entries=(), own=()):
        super().__init__(params, lr=0.1)
        self.entries, self.own = dict(entries), dict(own)

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param].update({key: make(param) for key, make in self.entries.items()})
        self.state.update(self.own)


def test_state_of_no_parameter_is_rejected(tmp_path):
    engine = make_small(optimizer=lambda params: Keeps(params, {}, {"all": {"k": 1}}))
    train(engine, 1)
    with pytest.raises(InputError, match="Keeps keeps state of no parameter, 'all'; keep it in the param_groups"):
        engine.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path):
    """A Python float in place of a np.float32 would change what is computed with it. And lists, and other shapes."""
    entries = {"decay": lambda param: np.float32(0.9), "past": lambda param: [param + 1]}
    entries["rows"] = lambda param: param.flatten(1).sum(1) if param.dim() > 1 else param
    waves = lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 9))  # noqa: E731

    def make(seed, rate, layer, seen):
        group = {"lr": np.float32(rate), "weight_decay": np.float64(0.1), "layer": layer}
        optimizer = lambda params: Keeps([{"params": params, **group}], entries)  # noqa: E731
        engine = make_small(optimizer=optimizer, seed=seed, lr_scheduler=waves)
        engine.attach("seen", seen)
        return engine

    seen = {"rows": np.arange(3, dtype="f4"), "deep": [(np.float16(0.1), np.bool_(1))], "zero_dim": np.array(2)}
    expected = train(engine := make(0, 0.01, np.int64(3), seen), 4, save_at=2, folder=tmp_path)[2:]
    other = make(1, 0.3, 0, found := {})
    other.load(tmp_path)
    group = other.optimizer.param_groups[0]
    assert [type(group[key]) for key in ("initial_lr", "lr", "layer")] == [np.float32, np.float64, np.int64]
    assert (found["rows"].dtype, found["deep"], found["zero_dim"].shape) == ("f4", [(np.float16(0.1), np.bool_(1))], ())
    assert type(other.optimizer.state[other.model.first.weight]["decay"]) is np.float32
    assert train(other, 2) == expected
    assert differing(weights(other), weights(engine)) == []
    ours, theirs = (each.optimizer.state[each.model.first.weight] for each in (other, engine))
    assert torch.equal(ours["past"][0], theirs["past"][0])
    assert torch.equal(ours["rows"], theirs["rows"])


def test_groups_in_another_order(tmp_path):
    """Settings come back by names; a scheduler knows groups by their number."""

    def in_groups(params):
        return optim.AdamW([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.001}])

    def swapped(params):
        return optim.AdamW([{"params": params[2:], "lr": 0.001}, {"params": params[:2], "lr": 0.1}])

    engine = make_small(optimizer=in_groups, lr_scheduler=halved)
    train(engine, 2)
    engine.save(tmp_path)
    with pytest.raises(InputError, match=r"are here in the order 1, 0: lr_scheduler would swap the rates; build"):
        make_small(optimizer=swapped, lr_scheduler=halved).load(tmp_path)
    (alone := make_small(optimizer=swapped)).load(tmp_path)
    rates, saved = ([group["lr"] for group in each.optimizer.param_groups] for each in (alone, engine))
    assert rates == saved[::-1]


def test_another_model_or_optimizer_is_rejected_and_nothing_changes(tmp_path):
    engine = make_small(lr_scheduler=lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 0.5))
    train(engine, 1)
    engine.save(tmp_path)
    model = Net()
    model.head = nn.Linear(16, 9)
    model.ups = model.up
    del model.up
    other = make_small(model=model, optimizer=lambda params: optim.SGD(params, lr=0.1))
    before = weights(other)
    rejected = said(other.load, tmp_path)
    for words in (
        "step-00000001 does not fit the model and optimizer of this engine:",
        "the checkpoint has no ups.bias (but up.bias), ups.weight (but up.weight)",
        "different shapes: head.bias ((4,) in the checkpoint, (9,) here), head.weight",
        "it was saved with the optimizer torch.optim.adamw.AdamW, but this is torch.optim.sgd.SGD; use the same class",
    ):
        assert words in rejected
    assert differing(weights(other), before) == []
    with pytest.raises(InputError, match=r"has groups of \[14\] parameters, this one of \[2, 2\]"):
        make_small(optimizer=lambda p: optim.AdamW([{"params": p[:2]}, {"params": p[2:4]}], lr=0.1)).load(tmp_path)
    with pytest.raises(InputError, match=r"with the lr_scheduler torch.*LambdaLR, but this is .*StepLR"):
        make_small(lr_scheduler=halved).load(tmp_path)


class Count:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_attached_state_goes_with_checkpoints_even_if_nobody_takes_it(tmp_path):
    engine, count, best = make_small(), Count(7), {"accuracy": 0.5}
    engine.attach("count", count)
    engine.attach("best", best)
    engine.save(tmp_path / "a")
    state = engine.state_dict()
    for load in (lambda: engine.load(tmp_path / "a"), lambda: engine.load_state_dict(state)):
        count.value, best["accuracy"] = 8, 0.6
        load()
        assert (count.value, best) == (7, {"accuracy": 0.5})  # a dict is updated in place
    between = make_small()
    between.load(tmp_path / "a")
    between.save(tmp_path / "b")
    last, late = make_small(), Count()
    last.load(tmp_path / "b")
    last.attach("count", late)
    assert late.value == 7
    last.detach("count")
    late.value = 8  # its own again
    last.attach("count", kept := Count())
    assert kept.value == 7
    last.detach("count", keep=False)
    last.attach("count", fresh := Count())
    assert fresh.value == 0


def test_attached_state_that_cannot_be_saved_or_found_is_rejected(tmp_path):
    engine = make_small()
    engine.attach("odd", Count(nn.Linear(1, 1)))
    with pytest.raises(InputError, match=r"attach\('odd', ...\): the name is taken"):
        engine.attach("odd", Count())
    with pytest.raises(InputError, match=r"torch.nn.modules.linear.Linear in the state of .*, attached: loading it"):
        engine.save(tmp_path)


def over_ranks(rank, world_size, folder):
    """Attached state that was loaded in the layout that saved it, and in another; and what is said of lists and numbers
    as state of sharded parameters."""
    engine, count = make_engine("dp2", "none"), Count(rank + 5)
    engine.attach("count", count)
    engine.save(folder)
    if rank == 1:
        engine._state.saved._known = b""  # as if it had been interrupted in a save
    engine.save(folder)
    train(engine, 1)  # the optimizer's state is new, of which ranks tell each other
    engine.save(folder)
    count.value, words = 0, []
    engine.load(folder)
    engine.close()
    with make_engine("tp2", "none") as other:
        other.load(folder)
        assert other.optimizer.state
        other.attach("count", there := Count())
    for make in (lambda param: [param], lambda param: np.float32(3)):
        with make_engine("tp2", "none", optimizer=lambda params, make=make: Keeps(params, {"kept": make})) as engine:
            train(engine, 1)
            words.append(said(engine.save, f"{folder}/parts"))
    return count.value, there.value, *words


@pytest.mark.distributed
def test_each_rank_gets_its_own_attached_state_back_and_in_another_layout_that_of_rank_0(tmp_path):
    """And lists as state of shards are rejected."""
    for rank, (own, there, of_list, of_number) in enumerate(run_ranks(over_ranks, 2, str(tmp_path))):
        assert (own, there, of_number) == (5 + rank, 5, "nothing")
        assert "Keeps keeps a list as state 'kept' of up.weight, a shard; use an optimizer whose state" in of_list
