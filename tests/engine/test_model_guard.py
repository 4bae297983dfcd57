"""What a loop does with the model and the optimizer, where the engine's own calls are meant: handled, or told once."""

from __future__ import annotations

import copy
import logging
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from halfmesh import InputError
from tests.support.models import MODES, full_weights, make_data, make_engine, step_on
from tests.support.ranks import here, run_ranks

X, Y = make_data(8)
HALVES = (slice(0, 4), slice(4, 8))
DIRECT = "the model itself was called in training, not the engine"
CASTS = {"torch_bf16": "computes in float32, not in bfloat16", "naive_bf16": "are not cast to bfloat16"}


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
    assert CASTS.get(mode, "") in caplog.text
    assert caplog.text.count("Replace model(x) by engine(x)") == (mode != "none")
    engine.close()
    engine.model(X)
    assert caplog.text.count(DIRECT) == (mode != "none")


def call_directly(rank, world_size, parallel):
    """What is logged when the model is called in place of the engine, in fp32."""
    heard = []
    logging.getLogger("halfmesh.engine.executor").addFilter(lambda record: heard.append(record.getMessage()) or True)
    engine = make_engine({"parallel": parallel})
    step_on(engine, X, Y)
    assert heard == []
    engine.model(here(X))
    engine.close()
    return heard


@pytest.mark.distributed
def test_ranks_that_share_a_batch_are_told_in_fp32_too():
    heard = run_ranks(call_directly, 2, {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}})
    assert all(DIRECT in text and "draw different dropout" in text for (text,) in heard)


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
    for other in (copy.deepcopy(engine.model), torch.optim.swa_utils.AveragedModel(engine.model)):
        other(X)
    pickle.loads(pickle.dumps(engine.model))(X)
    torch.export.export(engine.model, (X,))
    assert DIRECT not in caplog.text
    nn.Sequential(engine.model)(X)
    assert DIRECT in caplog.text, "a module around the model does not know the config's precision either"


# --- zero_grad() of the model or the optimizer ------------------------------------------------------------------------

GONE = "gradients of this update are gone"


@pytest.mark.parametrize("mode", ["none", "naive_bf16"])
def test_gradients_that_vanish_within_a_cycle_are_an_error(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2})
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
