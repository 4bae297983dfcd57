"""What a loop does with the model and the optimizer, where the engine's own calls are meant: handled, or told once."""

from __future__ import annotations

import copy
import logging
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from halfmesh.engine import initialize as assembly
from halfmesh.errors import HalfmeshError
from tests.support.checkpoint_runs import Net
from tests.support.models import MODES, adamw, full_weights, make_data, make_engine, step_on
from tests.support.ranks import run_ranks

X, Y = make_data(8)
HALVES = (slice(0, 4), slice(4, 8))
DIRECT = "the model itself was called in training, not the engine"


@pytest.mark.parametrize("mode", ["none", "torch_bf16", "naive_bf16", "apex_o1"])
def test_a_model_that_is_called_directly_in_training_is_told_once(mode, caplog):
    engine = make_engine(MODES[mode])
    step_on(engine, X, Y)
    for _ in range(2):
        # torch's error of half-precision weights, and inputs that nobody has cast
        rejected = pytest.raises(RuntimeError, match="dtype") if mode == "naive_bf16" else nullcontext()
        with rejected:
            engine.criterion(engine.model(X), Y)
        assert caplog.text.count(DIRECT) == (mode != "none"), "fp32 is computed alike"
    assert caplog.text.count("Replace model(x) by engine(x)") == (mode != "none")
    engine.close()
    engine.model(X)
    assert caplog.text.count(DIRECT) == (mode != "none")


def test_calls_that_are_meant_so_are_not_told(caplog):
    """Evaluation, a scope of the engine's, copies, and the engine's own calls."""
    engine = make_engine(MODES["torch_bf16"] | {"activation_checkpoint": {"patterns": ["first", "again"]}})
    for _ in range(2):
        step_on(engine, X, Y)
    with engine.precision_report():
        step_on(engine, X, Y)
    with torch.no_grad():
        engine.model(X)
    engine.eval()
    engine.model(X)
    engine.train()
    with engine.autocast():
        engine.model(X)
    copy.deepcopy(engine.model)(X)
    pickle.loads(pickle.dumps(engine.model))(X)
    torch.export.export(engine.model, (X,))
    assert DIRECT not in caplog.text


GONE = "gradients of this update are gone"


def test_gradients_that_vanish_within_a_cycle_are_an_error():
    engine = make_engine(MODES["naive_bf16"] | {"gradient_accumulation": 2})
    weights = full_weights(engine)
    step_on(engine, X[:4], Y[:4])
    engine.model.zero_grad()
    with pytest.raises(InputError, match=GONE):
        step_on(engine, X[4:], Y[4:])
    with pytest.raises(InputError, match=GONE):
        engine.step(last=True)
    assert all(torch.equal(weights[name], value) for name, value in full_weights(engine).items())
    for half in HALVES:  # a new cycle
        step_on(engine, X[half], Y[half])
    assert engine.global_step == 1


LAYOUTS = {
    "dp": ({}, [0, 0]),
    "tensor": ({"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}, [1, 1]),
    "pipeline": ({"pipeline": {"size": 2, "microbatches": 2, "partition": ["again"]}}, [1, 1]),
    "zero1": ({"data": "zero1"}, [0, 1]),
    "fsdp": ({"data": "fsdp"}, [1, 1]),
}
"""And how often each layout tells of model and optimizer."""


def asks_for_states(rank, world_size, folder):
    """How often each layout tells: by the engine's own calls, by the loop's, and by a copy."""
    heard, found = [], {}
    logging.getLogger("halfmesh.engine.executor").addFilter(lambda record: heard.append(record.getMessage()) or True)
    for layout, (parallel, _) in LAYOUTS.items():
        engine = make_engine({"parallel": parallel})
        step_on(engine, X, Y)
        engine.load_state_dict(engine.state_dict())
        engine.save(folder / layout)
        engine.load(folder / layout)
        engine.save_weights(folder / f"{layout}.pt", format="torch")
        own = len(heard)
        for _ in range(2):
            engine.model.state_dict()
            engine.optimizer.state_dict()
        told = [
            sum(f"{name}.state_dict() has only this rank's" in text for text in heard)
            for name in ("model", "optimizer")
        ]
        if layout != "fsdp":  # which cannot be copied
            copy.deepcopy(engine.model).state_dict()
        engine.full_state_dict(optimizer=True)
        engine.close()
        found[layout] = own, told, len(heard) - sum(told)
        heard.clear()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_states_that_are_parts_are_told_once(tmp_path):
    found = run_ranks(asks_for_states, 2, tmp_path)[0]
    assert found == {layout: (0, told, 0) for layout, (_, told) in LAYOUTS.items()}


# --- an initialize that fails -----------------------------------------------------------------------------------------


def looks(model, optimizer):
    """What of them is compared."""
    named = [*model.named_parameters(), *model.named_buffers()]
    own = [*vars(optimizer).items(), *(item for module in model.modules() for item in vars(module).items())]
    return {
        "tensors": [(name, tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad) for name, tensor in named],
        "params": [id(param) for param in model.parameters()],
        "own": [(name, len(value) if "hooks" in name else 0) for name, value in own],
        "groups": [[id(param) for param in group["params"]] for group in optimizer.param_groups],
        "settings": [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups],
        "state": [id(param) for param in optimizer.state],
    }


@pytest.mark.parametrize(
    ("mode", "how"),
    [("torch_fp16", "missing"), ("apex_o1", "missing"), ("naive_fp16", "other"), ("naive_fp16", "NonFiniteProbes")],
)
def test_model_and_optimizer_come_back(mode, how, tmp_path, monkeypatch):
    """From a resume without a checkpoint, or with another model's; and from an error."""
    model = Net()
    optimizer = adamw(model.parameters())
    keys = MODES[mode] | {"checkpoint": str(tmp_path / "saves"), "activation_checkpoint": {"patterns": ["up"]}}
    resume = {"resume": str(tmp_path / "resumed")} if how in ("missing", "other") else {}
    if how == "other":
        with halfmesh.initialize(nn.Linear(3, 3), adamw, config={}, device="cpu") as engine:
            engine.save(tmp_path / "resumed")
    before, values = looks(model, optimizer), copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patch:
        if not resume:
            patch.setattr(assembly, how, lambda *_, **__: 1 / 0)
        with pytest.raises((HalfmeshError, ZeroDivisionError)) as error:
            make_engine(keys | resume, model=model, optimizer=optimizer)
    assert not getattr(error.value, "__notes__", [])
    assert looks(model, optimizer) == before
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with make_engine(keys, model=model, optimizer=optimizer) as engine:
        engine.backward(engine.criterion(engine(X), Y))
        assert not engine.step().skipped
