"""A deferred model is what an ordinary build gives, and what can be wrong with it is said."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from tests.support.models import make_data, said
from tests.support.ranks import here, rank_device, run_ranks

sgd = partial(torch.optim.SGD, lr=0.1)


def build():
    torch.manual_seed(5)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    model[3].weight.no_decay = True  # what users set stays
    return model


def groups(model):
    plain = [p for p in model.parameters() if getattr(p, "no_decay", False)]
    return [
        {"params": plain, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if all(p is not q for q in plain)]},
    ]


def start(model, **config):
    """Of a model with its optimizer, or of a callable with another."""
    adamw = partial(torch.optim.AdamW, lr=0.01)
    optimizer = adamw(groups(model)) if isinstance(model, nn.Module) else adamw
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device=rank_device())


def losses(engine, steps=4):
    found = []
    for inputs, targets in list(zip(*(part.split(4) for part in here(make_data(16))), strict=True))[:steps]:
        loss = engine.criterion(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def deferred():
    with halfmesh.deferred_init():
        return build()


def dtypes(rank, world_size):
    """Of what the optimizer holds, and of buffers."""
    found = []
    for mode in ("naive", "torch"):
        with halfmesh.model_creation("bfloat16" if mode == "naive" else None, deferred=True):
            model = build()
        data = {"strategy": "fsdp", "buffer_dtype": "bfloat16"}
        engine = start(model, bf16={"mode": mode}, parallel={"data": data})
        if mode == "naive":
            losses(engine, 1)
        masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
        found.append((masters, engine.model[1].running_mean.dtype, engine.model[1].num_batches_tracked.dtype))
        engine.close()
    return found


@pytest.mark.distributed
def test_masters_of_a_model_in_half_precision_are_wide_and_buffers_as_wanted():
    for found in run_ranks(dtypes, 2):
        assert found == [({torch.float32}, torch.bfloat16, torch.int64)] * 2


def test_a_deferred_model_can_be_changed_and_copied_and_given_again():
    model = deferred()
    with pytest.raises(InputError, match="the class CrossEntropyLoss was given"):
        halfmesh.initialize(model, sgd, nn.CrossEntropyLoss, config={}, device="cpu")
    nn.init.constant_(model[0].weight, 2.0)
    model[3].load_state_dict(nn.Linear(16, 16).state_dict())
    before, average, unseen = list(model.parameters()), copy.deepcopy(model), copy.deepcopy(model)
    engine = start(model)
    assert all(a is b for a, b in zip(before, engine.model.parameters(), strict=True))
    assert engine.model[0].weight.eq(2).all()
    assert engine.model[3].weight.no_decay
    last = model[5].weight.detach().clone()
    for same in (start(deferred()), start(average), start(build)):
        assert torch.equal(same.model[5].weight, last)
    losses(engine)
    engine.close()
    trained = model[5].weight.detach().clone()
    assert torch.equal(start(model).model[5].weight, trained)
    assert not torch.equal(trained, last)
    with torch.no_grad(), pytest.raises(InputError, match=r"shape \(4, 16\) has no value: it was made under"):
        unseen[5].weight.lerp_(last, 0.5)


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
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)


def test_other_attributes_weak_references_and_ties():
    def some(params):
        return sgd(param for param in params if param.requires_grad)

    engine = halfmesh.initialize(Holder, some, config={}, device="cpu")
    model = engine.model
    assert model.count.tolist() == [0, 1, 2, 3]
    assert model.head.weight is model.again.weight
    assert model.no_decay[0] is model.head.bias
    assert model._scale is model.scales[0]
    assert [tensor.tolist() for tensor in (model.scales[0], model.free["shift"])] == [[2.0] * 4, [1.0] * 4]
    assert type(model.free["shift"]) is nn.Parameter
    held = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


@pytest.mark.promise("`model_creation(dtype)`, models larger than host memory")
def test_model_creation_in_another_dtype():
    with halfmesh.model_creation("bfloat16"):
        eager = build()
    with halfmesh.model_creation(torch.bfloat16, deferred=True):
        late = build()
    assert torch.get_default_dtype() == torch.float32
    engine = start(late, bf16={"mode": "naive"})
    assert {p.dtype for p in (*eager.parameters(), *engine.model.parameters())} == {torch.bfloat16}
    assert losses(engine, 1)[0] < 5


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
            "model: the callable fails raised ValueError: no such file: weights.pt. halfmesh calls it without",
        ),
        (reads, "model: the callable reads raised .*build the model first and pass the model itself"),
        (hooked, "weight have gradient hooks, which would be lost; register them after initialize"),
        (views, "0.weight, 1.weight share one memory; make each a separate parameter"),
        (lambda: 3, "expected a torch.nn.Module .or a callable that returns one., but got an int"),
    ],
    ids=["fails", "reads", "hooked", "views", "other"],
)
def test_what_a_callable_can_do_wrong(model, words):
    with pytest.raises(InputError, match=words):
        start(model)


class Eager(torch.optim.SGD):
    """Makes its state at once."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for param in self.param_groups[0]["params"]:
            self.state[param]["start"] = param.detach().clone()


def test_what_needs_values_at_once():
    with pytest.raises(InputError, match="Eager made its state from weights that have no values yet; use one that"):
        halfmesh.initialize(build, partial(Eager, lr=0.1), config={}, device="cpu")
    model = deferred()
    with pytest.raises(
        InputError, match=r"were made under halfmesh\.deferred_init\(\) and have no values yet; pass the"
    ):
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


def large():
    """The last layer has a value that fp16 cannot hold."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(layers[1].bias, 1e6)
    return layers


DIFFERENT = {
    "torch": "rank 1 would make other weights than rank 0: the random numbers",
    "numpy": "rank 1 would make other weights than rank 0",
    "some": "rank 1 built other tensors under halfmesh.deferred_init() than rank 0; use it",
    "large": "1.bias",
}


def build_apart(rank, world_size):
    """What is said of ranks that build other models, or of which one cannot use a value; and a weight of an unseeded
    model, which is no problem."""
    torch.manual_seed(rank)
    with halfmesh.initialize(unseeded, sgd, config={}, device=rank_device()) as engine:
        weight = engine.model.weight.detach().clone()
    pipeline = {"fp16": {"mode": "naive"}, "parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
    models = {"torch": asks, "numpy": drawn, "some": build() if rank else deferred(), "large": large}
    found = {}
    for how, model in models.items():
        torch.manual_seed(rank if how == "torch" else 0), np.random.seed(rank)
        config = pipeline if how == "large" else {}
        found[how] = said(halfmesh.initialize, model, sgd, nn.MSELoss(), config=config, device=rank_device())
    return weight, found


@pytest.mark.distributed
def test_ranks_that_are_not_seeded_take_rank_0s_seeds_and_problems_of_one_are_told_on_all():
    torch.manual_seed(0)
    alone = halfmesh.initialize(unseeded, sgd, config={}, device="cpu").model.weight
    for weight, found in run_ranks(build_apart, 2):
        assert torch.equal(weight, alone)
        assert found.keys() == DIFFERENT.keys()
        for how, words in DIFFERENT.items():
            assert words in found[how]
