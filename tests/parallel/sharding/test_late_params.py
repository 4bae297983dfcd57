"""zero1 gathers new weights beside the next forward: what uses a weight first waits for it, and for no other."""

from __future__ import annotations

import copy
import io
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
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


@pytest.mark.parametrize("mode", ["none", "naive_bf16"])
def test_a_module_waits_for_its_weights_only(mode, late):
    engine = build(model=lambda: nn.Sequential(*[Told(8, 8) for _ in range(4)]), **MODES[mode])
    assert "; new weights arrive during the next forward, in extra memory" in str(engine.plan)
    step(engine)
    assert len(Late.sizes) == 4, "the update has waited for none"
    engine.zero_grad()
    assert len(Late.sizes) == 4
    output = engine(X)
    assert [layer.left for layer in engine.model] == [3, 2, 1, 0]
    assert [type(param) for param in engine.model.parameters()] == [nn.Parameter] * 8
    assert not any(module._forward_pre_hooks for module in engine.model)
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


def faked(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(X)
    return model(X)


def alone(graph, inputs):
    assert "copy" not in graph.code, "what is received is not a part of it"
    return graph


READS = {
    "a norm": lambda model, kept: sum(param.norm() for param in kept),
    "norms": lambda model, kept: sum(torch._foreach_norm(kept)),
    "a state dict": lambda model, kept: sum(value.sum() for value in model.state_dict().values()),
    ".data": lambda model, kept: sum(param.data.sum() for param in model.parameters()),
    "numpy": lambda model, kept: torch.tensor(kept[0].detach().numpy().sum()),
    "its memory": lambda model, kept: torch.tensor(list(kept[0].untyped_storage())).sum(),
    "a list": lambda model, kept: torch.tensor(kept[1].tolist()),
    "a copy of the model": lambda model, kept: copy.deepcopy(model)(X),
    "a copy of a parameter": lambda model, kept: copy.deepcopy(kept[0]),
    "a file": lambda model, kept: saved(model)(X),
    "a call of a module": lambda model, kept: model[2](X),
    "a call of the model": lambda model, kept: model(X),
    "a function of the weights": lambda model, kept: called(model),
    "its derivative": lambda model, kept: torch.func.grad(lambda params: called(model, params))(
        dict(model.named_parameters())
    )["0.weight"],
    "vmap": lambda model, kept: torch.vmap(torch.sum)(kept[0]),
    "compiled code": lambda model, kept: torch.compile(lambda: model(X) + kept[0], backend="eager")(),
    "compiled code of its own": lambda model, kept: torch.compile(lambda w: w * 2, backend=alone)(kept[0]),
    "a trace": lambda model, kept: torch.jit.trace(model, X, check_trace=False)(X),
    "a graph of operations": lambda model, kept: make_fx(model)(X)(X),
    "fake tensors": lambda model, kept: faked(model),
    "a hook": hooked,
    "torch's average": lambda model, kept: next(torch.optim.swa_utils.AveragedModel(model).parameters()),
}


@pytest.mark.parametrize("name", READS)
def test_all_that_reads_weights_reads_new_ones(name, late):
    if name == "compiled code of its own" and torch.__version__ < "2.13":
        pytest.skip("torch.compile calls __torch_function__ again and again, and says so")
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


def test_a_wait_that_is_interrupted_is_waited_for_again(late, monkeypatch):
    engine = build()
    step(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Late, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.model(X)
    expected = build(NOW)
    step(expected)
    assert torch.equal(engine.model(X), expected.model(X))
    engine.train()


def test_a_thread_waits_until_another_has_received(late, monkeypatch):
    engine = build()
    step(engine)
    first, found = threading.Event(), []
    wait = Late.wait

    def slow(work):
        first.set()
        other.join(0.2)  # it has to wait for this one
        wait(work)

    def read():
        first.wait()
        found.append(engine.model[0].weight.sum().item())

    monkeypatch.setattr(Late, "wait", slow)
    other = threading.Thread(target=read)
    other.start()
    value = engine.model[0].weight.sum().item()
    other.join()
    assert found == [value]
    engine.train()


@pytest.mark.parametrize("call", ["train", "eval", "state_dict", "full_state_dict", "averaged_model", "close"])
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


def fill_masters(engine):
    with torch.no_grad():
        for param in engine.master_params():
            param.fill_(0.5)


def fill_stepped(engine):
    fill_masters(engine)
    engine.train()


WRITES = {
    "a parameter": fill,
    "what is stepped": fill_masters,
    "what is stepped, and all is waited for": fill_stepped,
    "a state dict": lambda engine: engine.model.load_state_dict(build(NOW).model.state_dict()),
    "its data": lambda engine: setattr(engine.model[0].weight, "data", torch.full((8, 8), 0.5)),
    "a dtype": lambda engine: engine.model.to(torch.float64).to(torch.float32),
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
    with pytest.raises(InputError, match=r"'other.weight' has a gradient, but nothing waited for its new weights"):
        step(engine)
    engine.zero_grad()
    engine.train()
    step(engine.train())


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8)))

    def forward(self, x):
        return self.other(self.layer(x))


def test_modules_that_call_no_hooks_have_their_weights_at_once(late):
    engine = build(model=Scripted)
    step(engine)
    assert len(Late.sizes) == 1
    values = [param.data.clone() for param in engine.model.other.parameters()]
    engine.train()
    assert all(map(torch.equal, values, engine.model.other.parameters()))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("more", [{}, {"activation_checkpoint": "full"}], ids=["compiled", "and recomputed"])
def test_compiled_blocks_wait_for_their_weights(more, late):
    found = []
    for data in (NOW, LATE):
        torch._dynamo.reset()
        engine = build(data, model=Blocks, compile={"backend": "eager", "scope": "blocks", "fullgraph": True}, **more)
        for _ in range(3):
            step(engine)
        found.append(weights(engine))
    assert torch.equal(*found)


def test_a_model_that_is_compiled_as_a_whole_is_rejected():
    config = {"parallel": {"data": LATE}, "compile": {"scope": "model"}}
    with pytest.raises(
        IncompatibleConfigError, match=r"overlap_param_gather: a model that is compiled as a whole needs all"
    ):
        halfmesh.initialize(nn.Linear(8, 8), adamw, config=config)


def test_a_graph_of_before_the_update_is_rejected(late):
    engine = build()
    output = engine(X)
    step(engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


class OfAnother(nn.Module):
    """Computes with the weight of a layer that it does not call before, in code that torch does not show."""

    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(scripted(x, self.other.weight)) + self.other.bias


def test_old_weights_that_torch_does_not_show_are_nan(late):
    engine = build(model=OfAnother)
    step(engine)
    assert engine.criterion(engine(X), Y).isnan()
    assert weights(engine).isfinite().all(), "they have arrived"
