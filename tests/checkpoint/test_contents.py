"""What a checkpoint holds besides weights: counters, groups and state of optimizers, extra state, constants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.checkpoint.storage import read_manifest
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import (
    Net,
    change_manifest,
    differing,
    make_engine,
    make_small,
    train,
    weights,
    whole_state,
)
from tests.support.ranks import run_ranks


def test_what_a_checkpoint_lacks_is_told(tmp_path, caplog):
    """It was saved without precision, scheduler and loader, on a GPU."""
    halfmesh.initialize(Net(), lambda params: optim.AdamW(params), config={}, device="cpu").save(tmp_path)
    change_manifest(tmp_path / "step-00000000", device="cuda")
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


def test_the_size_that_a_save_logs_is_that_of_its_files(tmp_path, caplog):
    """In binary units, as everywhere."""
    engine = make_engine("one", "naive")
    with caplog.at_level("INFO"):
        folder = engine.save(tmp_path)
    size = sum(size for size, _ in read_manifest(folder)["files"].values())
    assert 1024 < size < 1024**2
    assert f"saved step 0 to {folder}: {size / 1024:.1f} KiB" in caplog.text


def activation(x):
    return x


def test_constants_of_any_type_are_saved_as_text(tmp_path):
    """In both kinds of saves, and read back."""
    itself = []
    itself.append(itself)
    constants = {
        "NORM": (nn.LayerNorm, "<class 'torch.nn.modules.normalization.LayerNorm'>"),
        "ACTIVATION": (activation, "<function activation>"),  # without its address
        "DTYPE": (torch.float16, "torch.float16"),
        "WEIGHTS": (torch.zeros(4000), "tensor([0., 0., 0.,  ..., 0., 0., 0.])"),
        "FOLDER": (tmp_path, str(tmp_path)),
        "RAW": (b"\xff", "b'\\xff'"),
        "MANY": (float("inf"), "inf"),
        "NESTED": ({"a": [{(1, 2): nn.ReLU, None: 1}]}, {"a": [{"(1, 2)": str(nn.ReLU), "None": 1}]}),
    }
    config = {key: value for key, (value, _) in constants.items()} | {"ITSELF": itself}
    engine = halfmesh.initialize(Net(), lambda params: optim.AdamW(params), config=config, device="cpu")
    for in_background in (False, True):
        place = engine.save(tmp_path / str(in_background), in_background=in_background)
        assert engine.load(tmp_path / str(in_background)) == place
        saved = read_manifest(place)["config"]
        assert {key: saved[key] for key in constants} == {key: text for key, (_, text) in constants.items()}
    halfmesh.RunFolder(engine, tmp_path / "run").close()


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


# -- state of optimizers ---------------------------------------------------------------------------------------------


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


KEPT = {"past": lambda param: [param + 1], "rows": lambda param: param.flatten(1).sum(1) if param.dim() > 1 else param}
KEPT["note"] = lambda param: 3


def test_lists_numbers_and_other_shapes_of_whole_parameters_come_back(tmp_path):
    engine = make_small(optimizer=lambda params: Keeps(params, KEPT))
    train(engine, 1)
    engine.save(tmp_path)
    other = make_small(optimizer=Keeps, seed=4)
    other.load(tmp_path)
    ours, theirs = other.optimizer.state[other.model.first.weight], engine.optimizer.state[engine.model.first.weight]
    assert torch.equal(ours["past"][0], theirs["past"][0])
    assert torch.equal(ours["rows"], theirs["rows"])
    assert ours["note"] == 3


def test_state_of_no_parameter_is_rejected(tmp_path):
    engine = make_small(optimizer=lambda params: Keeps(params, {}, {"all": {"k": 1}}))
    train(engine, 1)
    with pytest.raises(InputError, match="Keeps keeps state that belongs to no parameter, 'all', which"):
        engine.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def quantised():
    """State of torchao, of a size that it would leave unquantised."""
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")

    def make(param):
        state = subclass.OptimState8bit.zeros(param.shape, signed=True, block_size=param.shape[-1])
        state.codes.copy_(torch.arange(state.codes.numel()).view(state.codes.shape) % 256)
        state.scale.fill_(0.5)
        return state

    return {"exp_avg": lambda param: make(param) if param.dim() > 1 else torch.zeros_like(param)}


def state_of_parts(rank, world_size, folder):
    """What is said of lists and numbers of divided parameters, and the full state dict of quantised state of stages,
    which is saved."""
    said = []
    for make in (lambda param: [param], lambda param: np.float32(3)):
        engine = make_engine("tp2", "none", optimizer=lambda params, make=make: Keeps(params, {"kept": make}))
        train(engine, 1)
        try:
            engine.save(f"{folder}/parts")
            said.append("saved")
        except InputError as error:
            said.append(str(error))
    entries = quantised()
    engine = make_engine("pp2", "none", optimizer=lambda params: Keeps(params, entries))
    train(engine, 1)
    engine.save(f"{folder}/stages")
    state = engine.full_state_dict(optimizer=True, rank0_only=False)["optimizer"]["state"]
    engine.close()
    return *said, [state[name]["exp_avg"].codes.flatten()[:3].tolist() for name in ("first.weight", "head.weight")]


@pytest.mark.distributed
@pytest.mark.sends
def test_state_of_divided_parameters_and_quantised_state_of_stages(tmp_path):
    quantised()  # imports the class
    for kept, same, codes in run_ranks(state_of_parts, 2, str(tmp_path)):
        assert "Keeps keeps a list as state 'kept' of up.weight, of which this rank holds a shard" in kept
        assert same == "saved"
        assert codes == [[0, 1, 2]] * 2
    other = make_small(optimizer=Keeps)
    other.load(tmp_path / "stages")
    other.save(tmp_path / "one", in_background=True)
    other.wait_for_save()
    (last := make_small(optimizer=Keeps)).load(tmp_path / "one")
    for engine in (other, last):
        loaded = engine.optimizer.state[engine.model.head.weight]["exp_avg"]
        expected = quantised()["exp_avg"](engine.model.head.weight)
        assert type(loaded) is type(expected)
        assert (loaded.signed, loaded.block_size, loaded.dtype) == (True, 16, torch.float32)
        assert all(torch.equal(getattr(loaded, key), getattr(expected, key)) for key in ("codes", "scale", "qmap"))


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path):
    """A Python float in place of a np.float32 would change what is computed with it."""

    def make(seed, rate, layer, seen):
        group = {"lr": np.float32(rate), "weight_decay": np.float64(0.1), "layer": layer}
        engine = make_small(
            optimizer=lambda params: Keeps([{"params": params, **group}], {"decay": lambda param: np.float32(0.9)}),
            seed=seed,
            lr_scheduler=lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 9)),
        )
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


# -- groups ----------------------------------------------------------------------------------------------------------


def in_groups(*order):
    """AdamW, with the first and the other parameters in groups of this order."""

    def build(params):
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.001}]
        return optim.AdamW([groups[number] for number in order])

    return build


def halved(optimizer):
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def rates(engine):
    return [group["lr"] for group in engine.optimizer.param_groups]


def test_groups_in_another_order(tmp_path):
    """Settings come back by names; a scheduler knows groups by their number."""
    engine = make_small(optimizer=in_groups(0, 1), lr_scheduler=halved)
    train(engine, 2)
    engine.save(tmp_path)
    with pytest.raises(InputError, match="groups are here in the order 1, 0: lr_scheduler"):
        make_small(optimizer=in_groups(1, 0), lr_scheduler=halved).load(tmp_path)
    same, alone = make_small(optimizer=in_groups(0, 1), lr_scheduler=halved), make_small(optimizer=in_groups(1, 0))
    same.load(tmp_path)
    alone.load(tmp_path)
    assert rates(same) == rates(engine)
    assert rates(alone) == rates(engine)[::-1]


def test_a_group_that_was_added(tmp_path):
    """Saved and loaded before the step that would take it in, and after it."""

    def grown():
        optimizer = lambda params: optim.AdamW(params[:4], lr=0.1)  # noqa: E731
        engine = make_engine("one", "naive", samples=16, batch=4, optimizer=optimizer)
        train(engine, 1)
        engine.optimizer.add_param_group({"params": list(engine.model.head.parameters()), "lr": 0.5})
        return engine

    engine = grown()
    engine.save(tmp_path / "early")
    train(engine, 1)
    engine.save(tmp_path / "later")
    for folder in ("early", "later"):
        other = grown()
        other.load(tmp_path / folder)
        assert [len(group["params"]) for group in other.optimizer.param_groups] == [4, 2]
        assert rates(other)[1] == 0.5
    assert differing(whole_state(other), whole_state(engine)) == []


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
    with pytest.raises(InputError) as rejected:
        other.load(tmp_path)
    for words in (
        "step-00000001 does not fit the model and optimizer of this engine:",
        "the checkpoint has no ups.bias (but up.bias), ups.weight (but up.weight)",
        "different shapes: head.bias ((4,) in the checkpoint, (9,) here), head.weight",
        "it was saved with the optimizer torch.optim.adamw.AdamW, but this is torch.optim.sgd.SGD; use the same class",
    ):
        assert words in str(rejected.value)
    assert differing(weights(other), before) == []
    with pytest.raises(InputError, match=r"has groups of \[14\] parameters, but this one has groups of \[2, 2\]"):
        make_small(optimizer=lambda p: optim.AdamW([{"params": p[:2]}, {"params": p[2:4]}], lr=0.1)).load(tmp_path)
    with pytest.raises(InputError, match=r"with the lr_scheduler torch.*LambdaLR, but this is .*StepLR"):
        make_small(lr_scheduler=halved).load(tmp_path)
