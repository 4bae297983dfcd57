"""zero1 gathers new weights beside the next forward: what uses a weight first waits for it, and for no other."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.parallel.test_late_collectives import Late, two_ranks  # noqa: F401
from tests.support.models import MODES, adamw

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8)
NOW = {"strategy": "zero1", "bucket_mb": 0.0003}
"""A bucket for each layer."""
LATE = NOW | {"overlap_param_gather": True}


@pytest.fixture
def late(request):
    """Two ranks, whose collectives end when they are waited for."""
    request.getfixturevalue("two_ranks").append(True)
    yield
    Late.sizes.clear()


def build(data=LATE, model=None, **config):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]) if model is None else model()
    config = {"clip_grad_norm": 0.5, "parallel": {"data": data}} | config
    return halfmesh.initialize(model, adamw, nn.CrossEntropyLoss(), config=config, device="cpu")


def step(engine, x=X):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), Y))
    engine.step()


def weights(engine):
    return torch.cat([param.detach().flatten() for param in engine.train().model.parameters()])


class Told(nn.Linear):
    """Tells, in forward, how many gathers are still in flight."""

    def forward(self, x):
        self.left = len(Late.sizes)
        return super().forward(x)


def test_a_module_waits_for_its_weights_only(late):
    engine = build(model=lambda: nn.Sequential(*[Told(8, 8) for _ in range(4)]), **MODES["naive_bf16"])
    step(engine)
    assert len(Late.sizes) == 4, "the update has waited for none"
    engine.zero_grad()
    assert len(Late.sizes) == 4
    output = engine(X)
    assert [layer.left for layer in engine.model] == [3, 2, 1, 0]
    engine.backward(engine.criterion(output, Y))
    engine.step()
    engine.train()
    assert not Late.sizes, "all"


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"_rebuild_parameter_with_state" not in file.getvalue(), "they are saved as ordinary ones are"
    file.seek(0)
    return torch.load(file, weights_only=False)


def hooked(model, kept):
    found = []
    handle = model[0].register_forward_pre_hook(lambda *_: found.append(kept[-1].sum()), prepend=True)
    model(X)
    handle.remove()
    return found[0]


def called(model, params=None):
    return torch.func.functional_call(model, params or dict(model.named_parameters()), X).square().sum()


READS = {
    "a norm": lambda model, kept: sum(param.norm() for param in kept),
    "a copy of the model": lambda model, kept: copy.deepcopy(model)(X),
    "a file": lambda model, kept: saved(model)(X),
    "a call of a module": lambda model, kept: model[2](X),
    "its derivative": lambda model, kept: torch.func.grad(lambda params: called(model, params))(
        dict(model.named_parameters())
    )["0.weight"],
    "a hook": hooked,
}


@pytest.mark.parametrize("name", READS)
def test_all_that_reads_weights_reads_new_ones(name, late):
    found = []
    for data in (NOW, LATE):
        engine = build(data)
        kept = list(engine.model.parameters())
        step(engine)
        step(engine)
        assert len(Late.sizes) == 4 * (data is LATE)
        found.append(READS[name](engine.model, kept).detach().clone())
        engine.train()
        assert {type(param) for param in kept} == {nn.Parameter}
    assert torch.equal(*found)


@pytest.mark.parametrize("call", ["train", "state_dict", "full_state_dict", "averaged_model"])
def test_calls_of_the_engine_wait_for_all(call, late):
    found = []
    for data in (NOW, LATE):
        engine = build(data)
        memory = [param.data for param in engine.model.parameters()]  # of which torch does not tell
        step(engine)
        getattr(engine, call)(*[0.5] * (call == "averaged_model"))
        assert not Late.sizes
        found.append(torch.stack([value.sum() for value in memory]))
    assert torch.equal(*found)


def fill(engine):
    with torch.no_grad():
        engine.model[1].weight.fill_(0.5)


WRITES = {
    "a parameter": fill,
    "its data": lambda engine: setattr(engine.model[0].weight, "data", torch.full((8, 8), 0.5)),
    "a state": lambda engine: engine.load_state_dict(copy.deepcopy(engine.state_dict())),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_not_overwritten_by_weights_that_come_late(name, late):
    found = []
    for data in (NOW, LATE):
        engine = build(data)
        step(engine)
        WRITES[name](engine)
        step(engine)
        step(engine)
        found.append(weights(engine))
    assert torch.equal(*found)


class Unseen(nn.Module):
    """Computes with the weight of a module that it does not call, as a CUDA graph or C++ extension might."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(self.layer(x), self.other.weight)


def test_a_gradient_of_weights_that_nothing_has_waited_for_is_rejected(late):
    engine = build(model=Unseen)
    step(engine)
    assert engine.model(X).isnan().any(), "what comes is nan until then"
    with pytest.raises(InputError, match=r"'other.weight' has a gradient, but nothing waited for its new weights"):
        step(engine)
    engine.zero_grad()
    engine.train()
    step(engine.train())
