"""A deferred model trains as one that was built with the same values, and what can be wrong with it is said."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from tests.support.models import said
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.sharding import MODES, batch
from tests.support.whole import close_whole

sgd = partial(torch.optim.SGD, lr=0.1)


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
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device=rank_device())


def losses(engine, rank, steps=4):
    found = []
    for step in range(steps):
        inputs, targets = here(batch(rank, step))
        engine.zero_grad()
        loss = engine.criterion(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def deferred():
    with halfmesh.deferred_init():
        return build()


def compare(rank, world_size, parallel, modes):
    """Losses and weights of a model with the values of a deferred one, and of that one."""
    with halfmesh.initialize(deferred(), sgd, config={}, device=rank_device()) as engine:
        values = engine.model.state_dict()
    for mode in modes:
        ordinary, runs = build(), []
        ordinary.load_state_dict(values)
        for model in (ordinary, deferred()):
            engine = start(model, parallel=parallel, **MODES[mode])
            found = losses(engine, engine.context.dp_rank)
            runs.append((found, close_whole(engine)))
        (expected, weights), (found, others) = runs
        assert found == expected, mode
        assert all(torch.equal(value, others[name]) for name, value in weights.items()), mode


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [
        {"data": "fsdp"},
        {"data": "zero1"},
        pytest.param({"pipeline": {"size": 2, "microbatches": 2}}, marks=pytest.mark.sends),
    ],
    ids=str,
)
def test_training_is_that_of_a_model_with_the_same_values(parallel):
    run_ranks(compare, 2, parallel, ["fp32", "torch_fp16", "naive_bf16"], timeout=120)


def test_one_process_and_optimizers_of_both_kinds():
    one, other = start(deferred()), start(build, given="callable")
    for key, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key])
    assert one.model[3].weight.no_decay
    assert losses(one, 0) != losses(one, 0, 1)
    assert not any(p.is_meta for p in one.model.parameters())
    one.close(), other.close()


def dtypes(rank, world_size):
    """Of what the optimizer holds, and of buffers."""
    found = []
    for mode in ("naive", "torch"):
        with halfmesh.model_creation("bfloat16" if mode == "naive" else None, deferred=True):
            model = build()
        data = {"strategy": "fsdp", "buffer_dtype": "bfloat16"}
        engine = start(model, bf16={"mode": mode}, parallel={"data": data})
        if mode == "naive":
            losses(engine, rank, 1)
        masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
        found.append((masters, engine.model[1].running_mean.dtype, engine.model[1].num_batches_tracked.dtype))
        engine.close()
    return found


@pytest.mark.promise("models too large in fp32")
@pytest.mark.distributed
def test_masters_of_a_model_in_half_precision_are_wide_and_buffers_as_wanted():
    for found in run_ranks(dtypes, 2):
        assert found == [({torch.float32}, torch.bfloat16, torch.int64)] * 2


def test_a_model_that_was_refused_can_be_changed_and_given_again():
    model = deferred()
    with pytest.raises(InputError, match="the class CrossEntropyLoss was given"):
        halfmesh.initialize(model, sgd, nn.CrossEntropyLoss, config={}, device="cpu")
    nn.init.constant_(model[0].weight, 2.0)
    model[3].load_state_dict(nn.Linear(16, 16).state_dict())
    engine = start(model)
    assert engine.model[0].weight.eq(2).all()
    assert torch.equal(engine.model[5].weight, start(deferred()).model[5].weight)


def test_the_objects_stay_and_trained_values_too():
    model = deferred()
    before, average, unseen = list(model.parameters()), copy.deepcopy(model), copy.deepcopy(model)
    engine = start(model)
    assert all(a is b for a, b in zip(before, engine.model.parameters(), strict=True))
    weight = model[0].weight.detach().clone()
    assert torch.equal(start(average).model[0].weight, weight), "a copy is deferred, too"
    losses(engine, 0)
    engine.close()
    trained = model[0].weight.detach().clone()
    assert torch.equal(start(model).model[0].weight, trained)
    assert not torch.equal(trained, weight)
    with torch.no_grad(), pytest.raises(InputError, match=r"shape \(16, 7\) has no value: it was made under"):
        unseen[0].weight.lerp_(weight, 0.5)


class Holder(nn.Module):
    """Tensors that are neither parameters nor buffers, some twice; a tied weight; an LSTM with its weak references."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.head.weight
        self.no_decay = [self.head.bias]
        self.scales = [torch.full((4,), 2.0), torch.linspace(0, 1, 4)]
        self._scale = self.scales[0]
        self.free = {"shift": nn.Parameter(torch.ones(4))}
        self.register_buffer("counter", torch.zeros(()), persistent=False)

    def forward(self, x):
        return self.again(self.head(self.lstm(x)[0][:, -1])) * self.scales[0] + self.scales[1] + self.counter


def test_other_attributes_weak_references_and_ties():
    engine = halfmesh.initialize(Holder, sgd, config={}, device="cpu")
    model = engine.model
    assert model.head.weight is model.again.weight
    assert model.no_decay[0] is model.head.bias
    assert model._scale is model.scales[0]
    assert [tensor.tolist() for tensor in (model.scales[0], model.free["shift"])] == [[2.0] * 4, [1.0] * 4]
    assert type(model.free["shift"]) is nn.Parameter
    loss = engine(torch.ones(2, 3, 4)).sum()
    engine.backward(loss)
    engine.step()
    assert engine(torch.ones(2, 3, 4)).sum() != loss
    held = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.promise(
    "`model_creation(dtype)`",
    "`halfmesh.model_creation`, in half precision and sharded",
    of="SageMaker",
    page="memory.md",
)
@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_model_creation_in_another_dtype(dtype):
    with halfmesh.model_creation(dtype):
        eager = build()
    with halfmesh.model_creation(dtype, deferred=True):
        late = build()
    assert torch.get_default_dtype() == torch.float32
    engine = start(late, bf16={"mode": "naive"})
    assert {p.dtype for p in (*eager.parameters(), *engine.model.parameters())} == {torch.bfloat16}
    assert losses(engine, 0, 1)[0] < 5


# -- what can be wrong -----------------------------------------------------------------------------------------------


def fails():
    raise ValueError("no such file: weights.pt")


def reads():
    linear = nn.Linear(7, 4)
    linear.bias.data = torch.from_numpy(linear.weight.detach().numpy().sum(1))
    return linear


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
        (views, "0.weight, 1.weight are views of one memory; make each a separate parameter"),
        (lambda: 3, "a torch.nn.Module .or a callable that returns one. is needed, but a int was given"),
    ],
    ids=["fails", "reads", "hooked", "views", "other"],
)
def test_what_a_callable_can_do_wrong(model, words):
    with pytest.raises(InputError, match=words):
        start(model, given="callable")


class Eager(torch.optim.SGD):
    """Makes its state at once."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["start"] = param.detach().clone()


def test_optimizers_that_need_values():
    with pytest.raises(InputError, match="Eager made its state from weights that have no values yet; take one whose"):
        halfmesh.initialize(build, partial(Eager, lr=0.1), config={}, device="cpu")


def test_convert_to_amp_takes_values():
    model = deferred()
    with pytest.raises(InputError, match=r"were made under halfmesh.deferred_init\(\), and have no values; pass the"):
        halfmesh.convert_to_amp(model, sgd(model.parameters()), nn.CrossEntropyLoss(), "naive", {})


def unseeded():
    return nn.Linear(7, 4)


def asks():
    linear = nn.Linear(7, 4)
    linear.scale = linear.weight.sum().item()
    return linear


def drawn():
    linear = nn.Linear(7, 4)
    linear.weight.data.mul_(torch.from_numpy(np.random.rand(4, 7).astype("float32")))
    return linear


def whole(rank):
    return build() if rank else deferred()


class Counted(nn.Module):
    """A parameter of integers; and a value that fp16 cannot hold on the last layer."""

    def __init__(self, large=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)
        with torch.no_grad():
            self.layers[1].bias.fill_(1e6 if large else 0.0)

    def forward(self, x):
        return self.layers(x)


def test_parameters_of_integers():
    engine = halfmesh.initialize(
        Counted, lambda params: sgd(p for p in params if p.requires_grad), config={}, device="cpu"
    )
    assert engine.model.count.tolist() == [0, 1, 2, 3]
    engine.close()


def large():
    return Counted(large=True).layers


def too_large(rank, world_size):
    config = {"fp16": {"mode": "naive"}, "parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
    return said(halfmesh.initialize, large, sgd, nn.MSELoss(), config=config, device=rank_device())


@pytest.mark.distributed
def test_a_value_that_one_rank_cannot_use_is_told_on_all():
    for found in run_ranks(too_large, 2):
        assert "1.bias" in found


DIFFERENT = {
    "torch": "rank 1 would make other values than rank 0: what the build asks of random numbers",
    "numpy": "rank 1 would make other values than rank 0",
    "some": "rank 1 built other tensors without memory than rank 0; build the model under",
}


def build_apart(rank, world_size):
    """What is said of ranks that build other models; and a weight of an unseeded one, which is no problem."""
    torch.manual_seed(rank)
    engine = halfmesh.initialize(unseeded, sgd, config={}, device=rank_device())
    weight = engine.model.weight.detach().clone()
    engine.close()
    found = {}
    for how in DIFFERENT:
        torch.manual_seed(rank if how == "torch" else 0), np.random.seed(rank)
        model = {"torch": asks, "numpy": drawn}.get(how) or whole(rank)
        found[how] = said(halfmesh.initialize, model, sgd, config={}, device=rank_device())
    return weight, found


@pytest.mark.distributed
def test_ranks_that_are_not_seeded_take_rank_0s_seeds_and_those_that_differ_are_refused():
    torch.manual_seed(0)
    alone = halfmesh.initialize(unseeded, sgd, config={}, device="cpu").model.weight
    for weight, found in run_ranks(build_apart, 2):
        assert torch.equal(weight, alone)
        for how, words in DIFFERENT.items():
            assert words in found[how]
