"""State: exact resume, weights loaded or written by others, copies, close."""

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
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    sgd,
    train,
)


@pytest.mark.parametrize("mode", MODES)
def test_bitwise_resume(mode):
    """Dropout, shuffling, accumulation, a growth ahead; through torch.save."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()}
    config |= {"gradient_accumulation": 2, "clip_grad_norm": 1.0}

    def make():
        return make_engine(
            config,
            model=MLP(dropout=0.3),
            optimizer=adamw,
            loader=make_loader(40, 4, shuffle=True),
            lr_scheduler=lambda o: halfmesh.CosineAnnealingWarmupLR(o, total_steps=50, warmup_steps=3),
        )

    torch.manual_seed(11)
    engine = make()
    train(engine, epochs=2)
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    expected_results = [repr(r) for r in train(engine, epochs=2)]
    torch.manual_seed(12)
    other = make()
    train(other, epochs=1)  # state of its own, to be overwritten
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [repr(r) for r in train(other, epochs=2)] == expected_results
    torch.testing.assert_close(full_weights(other), full_weights(engine), rtol=0, atol=0)
    torch.testing.assert_close(other.model.state_dict(), engine.model.state_dict(), rtol=0, atol=0)
    assert other.global_step == engine.global_step
    assert other.dataloader.epoch == engine.dataloader.epoch == 3


def test_state_holds_full_precision_weights_of_tied_parameters_too():
    engine = make_engine(FP16_NAIVE)
    train(engine)
    weights = engine.state_dict()["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert weights["tied.weight"] is weights["again.weight"] or torch.equal(
        weights["tied.weight"], weights["again.weight"]
    )


def test_state_refusals():
    engine = make_engine(FP16_TORCH | {"gradient_accumulation": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    with pytest.raises(InputError, match=r"state_dict\(\) was called after microbatch 1 of 2"):
        engine.state_dict()
    with pytest.raises(InputError, match=r"not the state of an engine: model, update, .* missing"):
        engine.load_state_dict({"epoch": 1})
    state = make_engine().state_dict()
    with pytest.raises(InputError, match="saved without a loss scale, but this run trains with a loss scale"):
        engine.load_state_dict(state)


def test_loading_the_model_reaches_the_masters():
    engine = make_engine(FP16_NAIVE)
    saved = MLP(seed=5).state_dict()
    engine.model.load_state_dict(saved)
    torch.testing.assert_close(full_weights(engine), dict(saved), rtol=0, atol=0)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)], model=MLP(seed=5))) < 4e-4


EDITS = {
    "in place": lambda model: nn.init.constant_(model.last.weight, 3.0),
    "submodule loaded": lambda model: model.last.load_state_dict(
        {"weight": torch.full_like(model.last.weight, 3.0), "bias": model.last.bias.detach()}
    ),
    "new data": lambda model: setattr(model.last.weight, "data", torch.full_like(model.last.weight, 3.0)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_weights_written_by_others_are_not_undone(mode, edit):
    engine = make_engine(MODES[mode], optimizer=lambda p: optim.SGD(p, lr=1e-3))
    train(engine)
    before = full_weights(engine)
    EDITS[edit](engine.model)
    assert full_weights(engine)["last.weight"].unique().tolist() == [3.0]
    torch.testing.assert_close(full_weights(engine)["last.bias"], before["last.bias"], rtol=0, atol=0)
    train(engine, max_batches=1)
    assert (full_weights(engine)["last.weight"] - 3.0).abs().max().item() < 0.05
    assert not torch.equal(full_weights(engine)["last.weight"], torch.full_like(before["last.weight"], 3.0))


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


def test_resume_repeats_no_epoch_with_a_generator_of_the_loader():
    def orders(engine, epochs):
        return [[y.tolist() for _, y in engine.dataloader] for _ in range(epochs)]

    def make():
        data = make_loader(24).dataset
        return make_engine(loader=halfmesh.get_dataloader(data, batch_size=8, shuffle=True))

    whole = orders(make(), 3)
    first = make()
    orders(first, 1)
    state = copy.deepcopy(first.state_dict())
    second = make()
    second.load_state_dict(state)
    assert orders(second, 2) == whole[1:]


def test_a_closed_engine_and_a_second_one_over_the_same_objects():
    model = MLP()
    optimizer = adamw(model.parameters())
    for _ in range(2):
        engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), FP16_NAIVE)
        with pytest.raises(InputError, match="optimizer: it belongs to another engine; close that one first"):
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


def test_close_gives_model_and_optimizer_back():
    engine = make_engine()
    optimizer = engine.optimizer
    with pytest.raises(InputError, match="called outside the engine"):
        optimizer.step()
    with engine:
        train(engine)
    optimizer.zero_grad()
    optimizer.step()
    assert "zero_grad" not in vars(optimizer)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_model_given_in_half_precision_goes_on_after_close(make):
    model = MLP().bfloat16()
    optimizer = make(model.parameters())
    with halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), BF16_NAIVE) as engine:
        train(engine)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    before = copy.deepcopy(model.state_dict())
    x, y = make_data(8)
    nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved >= {"first.weight", "again.weight", "last.weight"}  # what is near 1 moves by less than bf16 can show


def test_parameters_added_later_are_saved_in_full():
    """A model built in fp16, of which the optimizer holds nothing at first: the masters come later."""
    model = MLP().half()
    engine = make_engine({"fp16": {"mode": "naive"}}, model=model, optimizer=lambda p: optim.SGD(p[-2:], lr=0.1))
    assert engine.model.state_dict()["first.weight"].dtype == torch.float16
    engine.optimizer.add_param_group({"params": [model.first.weight]})
    train(engine, max_batches=2)
    saved = engine.model.state_dict()["first.weight"]
    assert saved.dtype == torch.float32
    assert saved.half().float().ne(saved).any()


def test_a_submodule_loads_in_full_precision():
    """The masters of a layer take what is loaded into that layer alone, not what is left of it in fp16."""
    engine = make_engine(FP16_NAIVE)
    saved = MLP(seed=5).last.state_dict()
    engine.model.last.load_state_dict(saved)
    torch.testing.assert_close(engine.model.last.state_dict(), saved, rtol=0, atol=0)
    torch.testing.assert_close(full_weights(engine)["last.weight"], saved["weight"], rtol=0, atol=0)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert (full_weights(engine)["last.weight"] - saved["weight"]).abs().max() < 0.05


@pytest.mark.parametrize("mode", ["none", "torch_fp16", "apex_o1", "apex_o2"])
def test_a_submodule_cannot_be_assigned_either(mode):
    engine = make_engine(MODES[mode])
    with pytest.raises(
        InputError, match=r"load_state_dict\(..., assign=True\) would replace parameters that the optimizer"
    ):
        engine.model.last.load_state_dict(copy.deepcopy(engine.model.last.state_dict()), assign=True)


class Partly(nn.Module):
    """A scripted layer, which takes no hooks of a state dict."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 4)))

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("mode", ["none", "torch_bf16", "naive_bf16", "apex_o0", "apex_o2"])
def test_scripted_layers_train_and_load(mode):
    engine = make_engine(MODES[mode], model=Partly())
    train(engine, max_batches=2)
    state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    engine.model.load_state_dict(state)
    train(engine, max_batches=1)
    engine.close()
    assert engine.model.first.weight.dtype == torch.float32


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


def test_a_model_pruned_after_initialize_is_saved_in_full():
    engine = make_engine(BF16_NAIVE, optimizer=adamw)
    prune.l1_unstructured(engine.model.first, "weight", amount=0.5)
    train(engine, max_batches=3)
    saved = engine.model.state_dict()["first.weight_orig"]
    master = engine._update.holdings.masters[engine.model.first.weight_orig]
    assert saved.dtype == torch.float32
    assert torch.equal(saved, master)
    assert not torch.equal(saved, saved.bfloat16().float()), "more than the model computes with"
    prune.remove(engine.model.first, "weight")
    weight = engine.model.state_dict()["first.weight"]
    assert weight.dtype == torch.float32
    assert (weight == 0).sum() >= weight.numel() // 2
    train(engine, max_batches=1)
