"""What a loop does with the model and the optimizer, where the engine's own calls are meant: handled, or told once."""

from __future__ import annotations

import copy
import logging
import pickle
import signal
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import InputError
from halfmesh.engine import initialize as assembly
from halfmesh.errors import HalfmeshError
from tests.support.checkpoint_runs import Net
from tests.support.models import MODES, adamw, full_weights, make_data, make_engine, make_loader, step_on
from tests.support.ranks import run_ranks

X, Y = make_data(8)
HALVES = (slice(0, 4), slice(4, 8))
DIRECT = "the model itself was called in training, not the engine"


# --- model(x) in place of engine(x) -----------------------------------------------------------------------------------


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


# --- zero_grad() of the model or the optimizer ------------------------------------------------------------------------

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


# --- state_dict of parts ----------------------------------------------------------------------------------------------

MODEL, OPTIMIZER = "model.state_dict() has only this rank's part", "optimizer.state_dict() has only this rank's part"
LAYOUTS = {
    "dp": ({}, [0, 0]),
    "tensor": ({"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}, [1, 1]),
    "pipeline": ({"pipeline": {"size": 2, "microbatches": 2, "partition": ["again"]}}, [1, 1]),
    "zero1": ({"data": "zero1"}, [0, 1]),
    "fsdp": ({"data": "fsdp"}, [1, 1]),
}
"""And how often each layout tells of model and optimizer."""


def asks_for_states(rank, world_size, folder):
    """How often each layout tells: by the engine's own calls, and by the loop's."""
    heard, found = [], {}
    logging.getLogger("halfmesh.engine.executor").addFilter(lambda record: heard.append(record.getMessage()) or True)
    for layout, (parallel, _) in LAYOUTS.items():
        make_engine({"parallel": parallel}).close()
        engine = make_engine({"parallel": parallel})
        step_on(engine, X, Y)
        state = engine.state_dict()
        engine.load_state_dict(state)
        engine.save(f"{folder}/{layout}")
        engine.load(f"{folder}/{layout}")
        engine.save_weights(f"{folder}/{layout}.pt", format="torch")
        own = len(heard)
        for _ in range(2):
            engine.model.state_dict()
            engine.optimizer.state_dict()
        told = [sum(words in text for text in heard) for words in (MODEL, OPTIMIZER)]
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
    found = run_ranks(asks_for_states, 2, str(tmp_path))[0]
    assert found == {layout: (0, told, 0) for layout, (_, told) in LAYOUTS.items()}


@pytest.fixture(autouse=True)
def _signals_have_pythons_handlers():
    """An engine that another test left, without closing it, has its own."""
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)


def start(model, optimizer, config, device="cpu"):
    return halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), config, device=device)


def hooks_of(*objects):
    found = (vars(thing) for thing in objects)
    return [(name, len(value)) for names in found for name, value in names.items() if "hooks" in name and value]


def looks(model, optimizer):
    """What of them is compared."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": [(name, tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad) for name, tensor in named],
        "params": [id(param) for param in model.parameters()],
        "hooks": hooks_of(*model.modules(), optimizer),
        "groups": [[id(param) for param in group["params"]] for group in optimizer.param_groups],
        "settings": [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups],
        "state": [id(param) for param in optimizer.state],
        "own": [name in vars(thing) for thing in (model, optimizer) for name in ("step", "forward")],
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
    }


def broken(*_, **__):
    raise ZeroDivisionError


def other(folder):
    """A checkpoint of another model."""
    model = nn.Linear(3, 3)
    with halfmesh.initialize(model, adamw(model.parameters()), config={}, device="cpu") as engine:
        engine.save(folder)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *((mode, "missing") for mode in ("torch_fp16", "naive_fp16", "apex_o1")),
        *(("naive_fp16", how) for how in ("other", "LRAdvance", "NonFiniteProbes")),
    ],
)
def test_model_and_optimizer_come_back(mode, how, tmp_path, monkeypatch):
    """From a resume without a checkpoint, or with another model's; and from errors at three steps."""
    model = Net()
    optimizer = adamw(model.parameters())
    keys = MODES[mode] | {"checkpoint": str(tmp_path / "saves"), "activation_checkpoint": {"patterns": ["up"]}}
    resume = {"resume": str(tmp_path / "resumed")} if how in ("missing", "other") else {}
    if how == "other":
        other(tmp_path / "resumed")
    before, values = looks(model, optimizer), copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patch:
        if not resume:
            patch.setattr(assembly, how, broken)
        with pytest.raises((HalfmeshError, ZeroDivisionError)) as error:
            start(model, optimizer, keys | resume)
    assert not getattr(error.value, "__notes__", [])
    assert looks(model, optimizer) == before
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with start(model, optimizer, keys) as engine:
        engine.backward(engine.criterion(engine(X), Y))
        assert not engine.step().skipped
