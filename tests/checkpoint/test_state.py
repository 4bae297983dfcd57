"""Weights that others load or write, state dicts that do not fit, copies of a model, and closed engines."""

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import MLP, MODES, adamw, full_weights, make_data, make_engine, make_loader, said, train

TORCH, NAIVE = MODES["torch_fp16"], MODES["naive_fp16"]


def test_states_that_do_not_fit_are_rejected():
    engine = make_engine(TORCH | {"gradient_accumulation": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert "state_dict() was called in the middle of a cycle, after microbatch 1 of 2" in said(engine.state_dict)
    for state, words in (
        (engine.model.state_dict(), "not the state of an engine: pass what engine.state_dict() returned"),
        (make_engine().state_dict(), "the state has 0 loss scales, this run 1; use the precision and num_losses"),
    ):
        assert words in said(engine.load_state_dict, state)


def test_masters_that_do_not_fit_are_rejected():
    engine = make_engine(NAIVE)
    before, state = full_weights(engine), make_engine(NAIVE, model=MLP(seed=5)).state_dict()
    masters = state["update"]["masters"]
    unfit = {
        "last.bias": {name: value for name, value in masters.items() if name != "last.bias"},
        "last.weight": masters | {"last.weight": torch.zeros(2, 16)},
    }
    for names, values in unfit.items():
        state["update"]["masters"] = values
        with pytest.raises(InputError, match=rf"^the fp32 masters in this state do not fit: {names} are missing there"):
            engine.load_state_dict(state)
        assert all(torch.equal(full_weights(engine)[name], value) for name, value in before.items())


FINE = torch.full((4, 16), 3.0001)  # masters take what the model in fp16 cannot show
EDITS = {
    "in place": lambda model: nn.init.constant_(model.last.weight, 3.0),
    "model loaded": lambda model: model.load_state_dict({**model.state_dict(), "last.weight": FINE}),
    "new data": lambda model: setattr(model.last.weight, "data", torch.full_like(model.last.weight, 3.0)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_weights_written_by_others_are_not_undone(mode, edit):
    engine = make_engine(MODES[mode], optimizer=lambda p: optim.SGD(p, lr=1e-3))
    train(engine)
    before = full_weights(engine)
    EDITS[edit](engine.model)
    value = FINE if "loaded" in edit else torch.full((4, 16), 3.0)
    assert torch.equal(full_weights(engine)["last.weight"], value)
    torch.testing.assert_close(full_weights(engine)["last.bias"], before["last.bias"], rtol=0, atol=0)
    train(engine, max_batches=1)
    assert 0 < (full_weights(engine)["last.weight"] - value).abs().max().item() < 0.05


def test_a_closed_engine_and_a_second_one_over_the_same_objects():
    model = MLP()
    optimizer = adamw(model.parameters())
    for _ in range(2):
        engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), NAIVE)
        train(engine)
        weights = full_weights(engine)
        engine.close()
        engine.close()
        torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    for call in (lambda: engine(torch.ones(8, 8)), engine.step):
        with pytest.raises(InputError, match="this engine is closed; call the model itself, or make a new engine"):
            call()
