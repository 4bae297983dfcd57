"""A deferred model trains as one that was built with the same values, and what can be wrong with it is said."""

from __future__ import annotations

import copy
import gc
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from halfmesh.deferred.recording import recording_of
from tests.support.models import said
from tests.support.ranks import run_ranks
from tests.support.sharding import MODES, batch


def build():
    torch.manual_seed(5)
    layers = [nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    model[3].weight.no_decay = True  # what users set stays
    return model


def groups(model):
    plain = [p for p in model.parameters() if getattr(p, "no_decay", False)]
    return [
        {"params": plain, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if all(p is not q for q in plain)]},
    ]


def start(model, given="optimizer", **config):
    optimizer = (lambda params: torch.optim.AdamW(params, lr=0.01)) if given == "callable" else None
    if optimizer is None:
        optimizer = torch.optim.AdamW(groups(model), lr=0.01)
        assert len(optimizer.param_groups[0]["params"]) == 1
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu")


def losses(engine, rank, steps=4):
    found = []
    for step in range(steps):
        inputs, targets = batch(rank, step)
        engine.zero_grad()
        loss = engine.criterion(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def deferred():
    with halfmesh.deferred_init():
        return build()


def values():
    """Of the deferred model, in one process."""
    with start(deferred()) as engine:
        engine.close()
        return {name: value.clone() for name, value in engine.model.state_dict().items()}


def compare(rank, world_size, parallel, modes):
    found = {}
    for mode in modes:
        config = {"parallel": parallel, **MODES[mode]}
        ordinary = build()
        ordinary.load_state_dict(values_of(rank, world_size))
        rows = []
        for model in (ordinary, deferred()):
            engine = start(model, **config)
            rows.append(losses(engine, engine.context.dp_rank))
            engine.close()
            rows.append({name: value.clone() for name, value in engine.model.state_dict().items()})
        found[mode] = rows[0] == rows[2] and all(torch.equal(rows[1][name], rows[3][name]) for name in rows[1])
    return found


def values_of(rank, world_size):
    """As `values`, within a group of several."""
    model = halfmesh.initialize(deferred(), lambda params: torch.optim.SGD(params, lr=0.1), config={}, device="cpu")
    model.close()
    return model.model.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel", [{"data": "fsdp"}, {"data": "zero1"}, {"pipeline": {"size": 2, "microbatches": 2}}], ids=str
)
def test_training_is_that_of_a_model_with_the_same_values(parallel):
    for found in run_ranks(compare, 2, parallel, list(MODES), timeout=240):
        assert found == dict.fromkeys(MODES, True)


def test_one_process_and_optimizers_of_both_kinds():
    one, other = start(deferred()), start(build, given="callable")
    for key, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key])
    assert one.model[3].weight.no_decay
    assert losses(one, 0) != losses(one, 0, 1)
    assert not any(p.is_meta for p in one.model.parameters())
    one.close(), other.close()


def test_the_objects_stay():
    model = deferred()
    before = list(model.parameters())
    average = copy.deepcopy(model)
    engine = start(model)
    assert all(a is b for a, b in zip(before, engine.model.parameters(), strict=True))
    assert recording_of(next(average.parameters())) is not None  # a copy is deferred, too
    assert torch.equal(start(average).model[0].weight, model[0].weight)


def test_a_trained_model_is_not_made_again():
    first = start(deferred())
    losses(first, 0)
    first.close()
    trained = first.model[0].weight.detach().clone()
    second = start(first.model)
    assert torch.equal(second.model[0].weight, trained)


def rounded(rank, world_size):
    with halfmesh.model_creation("bfloat16", deferred=True):
        model = build()
    data = {"strategy": "fsdp", "buffer_dtype": "bfloat16"}
    engine = start(model, bf16={"mode": "naive"}, parallel={"data": data})
    losses(engine, rank, 1)
    masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
    return masters, engine.model[1].running_mean.dtype


@pytest.mark.distributed
def test_masters_of_a_model_in_half_precision_are_wide_and_buffers_as_wanted():
    assert run_ranks(rounded, 2) == [({torch.float32}, torch.bfloat16)] * 2


def cast(rank, world_size):
    data = {"strategy": "fsdp", "buffer_dtype": "bfloat16"}
    engine = start(deferred(), bf16={"mode": "torch"}, parallel={"data": data})
    return engine.model[1].running_mean.dtype, engine.model[1].num_batches_tracked.dtype


@pytest.mark.distributed
def test_buffers_have_the_dtype_of_the_config():
    assert run_ranks(cast, 2) == [(torch.bfloat16, torch.int64)] * 2


def test_a_model_that_was_refused_can_be_given_again():
    model = deferred()
    with pytest.raises(InputError, match=r"LBFGS\.step needs a closure"):
        halfmesh.initialize(model, torch.optim.LBFGS(model.parameters()), config={}, device="cpu")
    assert torch.equal(start(model).model[0].weight, start(deferred()).model[0].weight)


def test_what_is_done_after_a_refusal_counts():
    model = deferred()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="the class CrossEntropyLoss was given"):
        halfmesh.initialize(model, sgd, nn.CrossEntropyLoss, config={}, device="cpu")
    nn.init.constant_(model[0].weight, 2.0)
    model[3].load_state_dict(nn.Linear(16, 16).state_dict())
    assert start(model).model[0].weight.eq(2).all()


def test_copies_that_initialize_has_not_seen_say_so():
    model = deferred()
    average = copy.deepcopy(model)
    engine = start(model)
    with torch.no_grad(), pytest.raises(InputError, match=r"shape \(16, 7\) has no value: it was made under"):
        average[0].weight.lerp_(engine.model[0].weight, 0.5)


def test_values_that_were_taken_are_not_held():
    large = torch.ones(1000, 1000)

    def build():
        layer = nn.Linear(1000, 1000)
        layer.weight.data.copy_(large)
        return layer

    held = sys.getrefcount(large)
    engine = halfmesh.initialize(build, lambda params: torch.optim.SGD(params, lr=0.1), config={}, device="cpu")
    gc.collect()
    assert sys.getrefcount(large) == held
    engine.close()


def test_an_optimizer_that_writes_into_weights():
    def write(params):
        with torch.no_grad():
            params[0].fill_(0.5)
        return torch.optim.SGD(params, lr=0.1)

    with pytest.raises(
        InputError, match=r"optimizer: the callable has written into 0\.weight, which have no values yet"
    ):
        halfmesh.initialize(build, write, config={}, device="cpu")


class Attributes(nn.Module):
    """Some are parameters, some are random, some are private, one is there twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.no_decay = [self.layer.bias]
        self._scale = torch.arange(4.0)
        self.other = self._scale
        self.free = {"shift": nn.Parameter(torch.ones(4))}


def test_attributes_are_what_they_were():
    engine = halfmesh.initialize(Attributes, lambda p: torch.optim.SGD(p, lr=0.1), config={}, device="cpu")
    model = engine.model
    assert model.no_decay[0] is model.layer.bias
    assert model._scale.tolist() == [0, 1, 2, 3]
    assert model.other is model._scale
    assert type(model.free["shift"]) is nn.Parameter


def overflow(rank, world_size):
    def large():
        layers = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 4))
        nn.init.constant_(layers[1].weight, 1e6)
        return layers

    pipeline = {"size": 2, "microbatches": 2}
    return said(
        halfmesh.initialize,
        large,
        lambda p: torch.optim.SGD(p, lr=0.1),
        nn.CrossEntropyLoss(),
        config={"parallel": {"pipeline": pipeline}, "fp16": {"mode": "naive"}},
        device="cpu",
    )


@pytest.mark.distributed
def test_a_value_that_one_stage_cannot_hold_is_said_on_all():
    assert all("'1.weight' holds values up to 1e+06" in found for found in run_ranks(overflow, 2))


class Holder(nn.Module):
    """Tensors that are neither parameters nor buffers, a tied weight, and an LSTM, which has weak references."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.head.weight
        self.scales = [torch.full((4,), 2.0), torch.linspace(0, 1, 4)]
        self.register_buffer("counter", torch.zeros(()), persistent=False)

    def forward(self, x):
        return self.again(self.head(self.lstm(x)[0][:, -1])) * self.scales[0] + self.scales[1] + self.counter


def test_other_attributes_weak_references_and_ties():
    engine = halfmesh.initialize(Holder, lambda p: torch.optim.SGD(p, lr=0.1), config={}, device="cpu")
    model = engine.model
    assert model.head.weight is model.again.weight
    assert model.scales[0].tolist() == [2.0] * 4
    assert model.scales[1][3] == 1
    loss = engine(torch.ones(2, 3, 4)).sum()
    engine.backward(loss)
    engine.step()
    assert engine(torch.ones(2, 3, 4)).sum() != loss
    held = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
def test_model_creation_in_another_dtype(dtype):
    with halfmesh.model_creation(dtype):
        eager = build()
    assert torch.get_default_dtype() == torch.float32
    with halfmesh.model_creation(dtype, deferred=True):
        late = build()
    wanted = getattr(torch, str(dtype).removeprefix("torch."))
    assert {p.dtype for p in (*eager.parameters(), *late.parameters())} == {wanted}
    mode = {"fp16" if wanted == torch.float16 else "bf16": {"mode": "naive"}}
    engine = start(late, **mode)
    assert {p.dtype for p in engine.model.parameters()} == {wanted}
    assert losses(engine, 0, 1)[0] < 5


def test_model_creation_changes_nothing_by_itself():
    with halfmesh.model_creation():
        assert torch.equal(build()[0].weight, build()[0].weight)
        assert recording_of(build()[0].weight) is None


def test_an_unknown_dtype():
    with pytest.raises(
        InputError, match=r"model_creation\(dtype='float61'\): not a dtype for parameters; did you mean"
    ):
        halfmesh.model_creation("float61").__enter__()


# -- what can be wrong -----------------------------------------------------------------------------------------------


def fails():
    raise ValueError("no such file: weights.pt")


def reads():
    linear = nn.Linear(7, 4)
    linear.bias.data = torch.from_numpy(linear.weight.detach().numpy().sum(1))
    return linear


def meta():
    return nn.Linear(7, 4, device="meta")


def hooked():
    linear = nn.Linear(7, 4)
    linear.weight.register_hook(lambda grad: grad)
    return linear


def views():
    flat = torch.empty(2, 7, 7).normal_()
    pair = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    pair[0].weight, pair[1].weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    return pair


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            fails,
            "model: the callable fails raised ValueError: no such file: weights.pt. It is called without arguments",
        ),
        (reads, "model: the callable reads raised .*build the model first and pass the model itself"),
        (hooked, "weight have hooks on the gradient, which would be lost; register them after initialize"),
        (views, "0.weight, 1.weight are views of one memory; make each a parameter of its own"),
        (meta, "on the meta device"),
        (lambda: 3, "a torch.nn.Module .or a callable that returns one. is needed, but a int was given"),
    ],
    ids=["fails", "reads", "hooked", "views", "meta", "other"],
)
def test_what_a_callable_can_do_wrong(model, words):
    with pytest.raises(InputError, match=words):
        start(model, given="callable")


def test_an_optimizer_with_state_of_values_that_are_not_there():
    class Eager(torch.optim.SGD):
        def __init__(self, params, **options):
            super().__init__(params, **options)
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["start"] = param.detach().clone()

    words = "Eager made its state from weights that have no values yet; take one whose state is made by its first step"
    with pytest.raises(InputError, match=words):
        halfmesh.initialize(build, lambda params: Eager(params, lr=0.1), config={}, device="cpu")
    model = deferred()
    with pytest.raises(InputError, match=words):
        halfmesh.initialize(model, Eager(model.parameters(), lr=0.1), config={}, device="cpu")


def test_convert_to_amp_takes_values():
    model = deferred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        InputError, match=r"were made under halfmesh.deferred_init\(\), and have no values; pass the model to"
    ):
        halfmesh.convert_to_amp(model, optimizer, nn.CrossEntropyLoss(), "naive", {})


def test_values_that_fp16_cannot_hold():
    def large():
        linear = nn.Linear(7, 4)
        nn.init.constant_(linear.weight, 1e6)
        return linear

    with pytest.raises(InputError, match="'weight' holds values up to 1e\\+06, but float16 ends at 65504"):
        start(large, given="callable", fp16={"mode": "naive"})


def different(rank, world_size, how):
    if how == "seed":
        torch.manual_seed(rank)
        make = asks
    elif how == "python":
        random.seed(rank), np.random.seed(rank)
        make = drawn
    elif how == "some":
        make = build() if rank == 1 else deferred()
    else:
        with halfmesh.deferred_init(from_rank0=True):
            make = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 4)) if rank else nn.Linear(7, 4)
    return said(halfmesh.initialize, make, lambda p: torch.optim.SGD(p, lr=0.1), config={}, device="cpu")


def unseeded():
    return nn.Linear(7, 4)


def asks():
    linear = nn.Linear(7, 4)
    linear.scale = linear.weight.sum().item()
    return linear


def unequal(rank, world_size):
    torch.manual_seed(rank)
    engine = halfmesh.initialize(unseeded, lambda p: torch.optim.SGD(p, lr=0.1), config={}, device="cpu")
    return engine.model.weight.detach().clone()


@pytest.mark.distributed
def test_ranks_that_are_not_seeded_take_rank_0s_seeds():
    first, second = run_ranks(unequal, 2)
    torch.manual_seed(0)
    alone = halfmesh.initialize(unseeded, lambda p: torch.optim.SGD(p, lr=0.1), config={}, device="cpu")
    assert torch.equal(first, second)
    assert torch.equal(first, alone.model.weight)


def drawn():
    linear = nn.Linear(7, 4)
    linear.weight.data.mul_(torch.from_numpy(np.random.rand(4, 7).astype("float32")))
    return linear


@pytest.mark.distributed
def test_ranks_that_differ():
    words = {
        "seed": "rank(s) [1] would make other values than rank 0: what the build asks of random numbers",
        "python": "rank(s) [1] would make other values than rank 0",
        "some": "rank(s) [1] built other tensors without memory than rank 0; build the model under",
        "from_rank0": "rank 0 built a model without 0.weight, 0.bias",
    }
    for how, text in words.items():
        for found in run_ranks(different, 2, how):
            assert text in found
            assert "begun to change" not in found


def balance(rank, world_size):
    loader = torch.utils.data.DataLoader([batch(0, 0)[0][0]] * 8, batch_size=4)
    pipeline = {"size": 2, "microbatches": 2, "balance": "time"}
    return said(
        halfmesh.initialize,
        build,
        lambda p: torch.optim.SGD(p, lr=0.1),
        nn.CrossEntropyLoss(),
        loader,
        config={"parallel": {"pipeline": pipeline}},
        device="cpu",
    )


@pytest.mark.distributed
def test_stages_by_time_need_values():
    for found in run_ranks(balance, 2):
        assert "it is deferred: its weights have no values yet" in found
        assert "use balance='parameters'" in found
