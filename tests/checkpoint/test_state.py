"""Weights that others load or write, state dicts that do not fit, copies of a model, and closed engines."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import prune

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import (
    BF16_NAIVE,
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    adamw,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    said,
    train,
)


def test_state_holds_full_precision_weights_of_tied_parameters_too():
    engine = make_engine(FP16_NAIVE)
    train(engine)
    weights = engine.state_dict()["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert torch.equal(weights["tied.weight"], weights["again.weight"])
    assert weights["last.weight"].half().float().ne(weights["last.weight"]).any()


def test_states_that_do_not_fit_are_rejected():
    engine = make_engine(FP16_TORCH | {"gradient_accumulation": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert "state_dict() was called in the middle of a cycle, after microbatch 1 of 2" in said(engine.state_dict)
    for state, words in (
        ({"epoch": 1}, "not the state of an engine: pass what engine"),
        (engine.model.state_dict(), "(for a model's state, call model.load_state_dict)"),
        (make_engine().state_dict(), "saved with 0 loss scales, but this run trains with 1;"),
    ):
        assert words in said(engine.load_state_dict, state)


def test_masters_that_do_not_fit_are_rejected():
    engine = make_engine(FP16_NAIVE)
    before, state = full_weights(engine), make_engine(FP16_NAIVE, model=MLP(seed=5)).state_dict()
    masters = state["update"]["masters"]
    unfit = {
        "first.weight, other": {"other" if name == "first.weight" else name: v for name, v in masters.items()},
        "last.bias": {name: value for name, value in masters.items() if name != "last.bias"},
        "last.weight": masters | {"last.weight": torch.zeros(2, 16)},
    }
    for names, values in unfit.items():
        state["update"]["masters"] = values
        with pytest.raises(InputError, match=rf"^the fp32 masters in this state do not fit: {names} are missing there"):
            engine.load_state_dict(state)
        assert all(torch.equal(full_weights(engine)[name], value) for name, value in before.items())


EDITS = {
    "in place": lambda model: nn.init.constant_(model.last.weight, 3.0),
    "model loaded": lambda model: model.load_state_dict({**model.state_dict(), "last.weight": loaded_value()}),
    "submodule loaded": lambda model: model.last.load_state_dict(
        {"weight": loaded_value(), "bias": model.last.bias.detach()}
    ),
    "new data": lambda model: setattr(model.last.weight, "data", torch.full_like(model.last.weight, 3.0)),
}


def loaded_value():
    """The masters take what the model in fp16 cannot show."""
    return torch.full((4, 16), 3.0001)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_weights_written_by_others_are_not_undone(mode, edit):
    engine = make_engine(MODES[mode], optimizer=lambda p: optim.SGD(p, lr=1e-3))
    train(engine)
    before = full_weights(engine)
    EDITS[edit](engine.model)
    value = loaded_value() if "loaded" in edit else torch.full((4, 16), 3.0)
    assert torch.equal(full_weights(engine)["last.weight"], value)
    torch.testing.assert_close(full_weights(engine)["last.bias"], before["last.bias"], rtol=0, atol=0)
    train(engine, max_batches=1)
    assert 0 < (full_weights(engine)["last.weight"] - value).abs().max().item() < 0.05


def test_copies_of_the_model_are_independent():
    """As an average of the weights (EMA) makes one, and torch.save of the whole module."""
    engine = make_engine(FP16_NAIVE)
    file = io.BytesIO()
    torch.save(engine.model, file)
    file.seek(0)
    before = full_weights(engine)
    for other in (copy.deepcopy(engine.model), torch.load(file, weights_only=False)):
        other.load_state_dict(MLP(seed=5).state_dict())
        torch.testing.assert_close(full_weights(engine), before, rtol=0, atol=0)
        torch.testing.assert_close(other.last.bias, MLP(seed=5).last.bias.half(), rtol=0, atol=0)
    assert copy.deepcopy(engine.optimizer).param_groups[0]["lr"] == 0.05


def test_a_closed_engine_and_a_second_one_over_the_same_objects():
    model = MLP()
    optimizer = adamw(model.parameters())
    for _ in range(2):
        engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), FP16_NAIVE)
        with pytest.raises(
            InputError, match=r"optimizer: another engine or convert_to_amp uses it; close\(\) that first"
        ):
            halfmesh.initialize(model, optimizer, config=FP16_NAIVE)
        train(engine)
        weights = full_weights(engine)
        engine.close()
        engine.close()
        torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    x, y = make_data(8)
    for call in (lambda: engine(x), lambda: engine.backward(engine.criterion(model(x), y)), engine.step):
        with pytest.raises(InputError, match="this engine is closed; call the model itself, or make a new engine"):
            call()


def test_a_model_given_in_half_precision_goes_on_after_close():
    model = MLP().bfloat16()
    optimizer = adamw(model.parameters())
    with halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), BF16_NAIVE) as engine:
        train(engine)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    before = copy.deepcopy(model.state_dict())
    x, y = make_data(8)
    nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved >= {"first.weight", "again.weight", "last.weight"}  # what is near 1 moves by less than bf16 can show


def test_loads_of_changed_models():
    """Pruned after initialize, a layer that the optimizer never held, and that layer assigned: nothing is lost."""
    engine = make_engine({}, optimizer=lambda p: optim.SGD(p[:1], lr=0.1))
    model = engine.model
    prune.identity(model.first, "weight")
    model.last.weight = nn.Parameter(torch.ones_like(model.last.weight))
    model.load_state_dict(model.state_dict())
    model.last.load_state_dict(copy.deepcopy(model.last.state_dict()), assign=True)
    with pytest.raises(InputError, match="assign=True"):
        model.first.load_state_dict(copy.deepcopy(model.first.state_dict()), assign=True)
