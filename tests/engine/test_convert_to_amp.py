"""convert_to_amp: precision alone, in a loop of one's own, without initialize, config file or process group."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh import convert_to_amp
from halfmesh.errors import IncompatibleConfigError
from tests.support.models import MLP, MODES, TOLERANCES, adamw, difference, make_data, reference, said, sgd
from tests.support.ranks import here, run_ranks

FULL, HALF = torch.float32, torch.float16
NOTHING = "step() was called before backward(loss)"


def converted(name, make_optimizer=sgd, **given):
    """By one of MODES."""
    [(key, keys)] = MODES[name].items()
    options = {option: value for option, value in keys.items() if option != "mode"} | given
    model = here(MLP())
    optimizer, dtype = make_optimizer(model.parameters()), {"fp16": "float16", "bf16": "bfloat16"}[key]
    return convert_to_amp(model, optimizer, nn.functional.cross_entropy, keys["mode"], options, dtype=dtype)


def batches(count=10):
    x, y = here(make_data(8 * count))
    return list(zip(x.split(8), y.split(8), strict=True))


def train(model, optimizer, criterion, data, max_norm=0.0):
    results = []
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        if max_norm:
            optimizer.clip_grad_norm(max_norm)
        results.append(optimizer.step())
    return results


@pytest.mark.promise("precision without the engine", "`convert_to_amp`", of="Colossal-AI", page="precision.md")
@pytest.mark.parametrize("name", ["torch_fp16", "naive_fp16", "naive_bf16", "apex_o1", "apex_o2"])
def test_parity_with_a_plain_fp32_loop(name):
    model, optimizer, criterion = converted(name)
    data, seen = batches(), set()
    model.module.first.register_forward_hook(lambda *given: seen.add(given[2].dtype))
    train(model, optimizer, criterion, data[:5], max_norm=0.7)
    if optimizer.loss_scale > 1:  # an overflow between good steps
        optimizer.backward(criterion(model(data[0][0]), data[0][1]) * math.inf)
        assert optimizer.step().skipped
        assert optimizer.skipped_steps == 1
    results = train(model, optimizer, criterion, data[5:], max_norm=0.7)
    assert seen == {torch.bfloat16 if "bf16" in name else HALF}
    assert all(math.isfinite(result.grad_norm) for result in results)
    assert difference(dict(model.state_dict()), reference(data, max_norm=0.7)) < TOLERANCES[name]
    assert {p.dtype for p in optimizer.master_params()} == {FULL}


def test_it_resumes_bitwise_and_close_gives_everything_back():
    first, second = converted("naive_fp16", adamw), converted("naive_fp16", adamw)
    train(*first, batches(3))
    file = io.BytesIO()
    torch.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, file)
    assert list(first[0].state_dict()) == list(MLP().state_dict())
    assert {value.dtype for value in first[0].state_dict().values()} == {FULL}
    train(*second, batches(1))
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second[0].load_state_dict(state["model"])
    second[1].load_state_dict(state["optimizer"])
    for each in (first, second):
        train(*each, batches(4))
    torch.testing.assert_close(second[0].state_dict(), first[0].state_dict(), rtol=0, atol=0)

    model, optimizer, criterion = second
    weights, module, (x, y) = copy.deepcopy(model.state_dict()), model.module, batches(1)[0]
    optimizer.close()
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(model(x), module(x))  # an fp32 model again
    told(lambda: optimizer.backward(criterion(model(x), y)), "this optimizer is closed")
    inner = optimizer.optimizer
    assert inner.param_groups[0]["params"][0] is module.first.weight
    convert_to_amp(module, inner, None, "torch")  # and again


@pytest.mark.promise("precision without the engine")
def test_it_needs_no_process_group_and_schedulers_take_either_optimizer(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # as under torchrun, with a process group of one's own or none
    model, optimizer, criterion = converted("naive_fp16")
    for theirs in (optimizer, optimizer.optimizer):
        scheduler = optim.lr_scheduler.ExponentialLR(theirs, 0.5)
        before = optimizer.param_groups[0]["lr"]
        result = train(model, optimizer, criterion, batches(1))[0]
        scheduler.step()
        assert result.lr == before
        assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == before / 2
    assert isinstance(optimizer, optim.Optimizer)
    assert not torch.distributed.is_initialized()


def test_the_wrapper_is_the_model_with_scopes_and_lists():
    model = converted("apex_o2")[0]
    assert model.module.first is model.first
    assert not model.eval().module.training
    for outer, close in ((nn.Sequential(model), 0), (optim.swa_utils.AveragedModel(model), 1e-3)):  # has no masters
        state = {name: value + 1 if value.is_floating_point() else value for name, value in outer.state_dict().items()}
        outer.load_state_dict(state)
        torch.testing.assert_close(dict(outer.state_dict()), state, rtol=close, atol=close)
    x, (o1, *_) = torch.randn(2, 2), converted("apex_o1")
    with o1.autocast():
        assert (x @ x.T).dtype == HALF
        with o1.autocast(enabled=False):
            assert (x @ x.T).dtype == FULL


class Second(nn.Linear):
    """The second version of a layer; weights of the first were half as large."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * (1 if metadata.get("version") == 2 else 2)
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_wrapper_in_another_module_keeps_the_versions_of_its_modules():
    model, alone = nn.Sequential(Second(3, 3)), nn.Sequential(Second(3, 3))
    wrapped, *_ = convert_to_amp(model, sgd(model.parameters()), None, "torch", dtype="bfloat16")
    weight, outer = model[0].weight.detach().clone(), nn.Sequential(wrapped)
    outer.load_state_dict(outer.state_dict())
    alone.load_state_dict(wrapped.state_dict())
    assert all(torch.equal(each[0].weight, weight) for each in (model, alone))


def told(call, words):
    assert words in said(call)


def test_misuse():
    model, optimizer, criterion = converted("torch_fp16")
    x, y = batches(1)[0]
    told(optimizer.step, f"{NOTHING}: call optimizer.backward")
    told(lambda: optimizer.clip_grad_norm(1.0), "clip_grad_norm was called before backward")
    criterion(model(x), y).backward()  # unscaled: it would be divided by the scale
    loss = criterion(model(x), y)
    told(lambda: optimizer.backward(loss), "The update would divide them by the loss scale")
    optimizer.zero_grad()
    optimizer.backward(loss)
    told(lambda: optimizer.step(lambda: loss), "it takes no closure")
    optimizer.load_state_dict(optimizer.state_dict())  # the gradients were of another scale
    told(optimizer.step, NOTHING)
    inner, other = optimizer.optimizer.state_dict(), converted("apex_o1", num_losses=2)[1].state_dict()
    told(lambda: optimizer.load_state_dict(inner), "not the state of an optimizer: pass what opt")
    told(lambda: optimizer.load_state_dict(other), "the state has 2 loss scales, this run 1;")
    words = "another engine or convert_to_amp uses it"  # a cell of a notebook that is run twice
    told(lambda: convert_to_amp(model, optimizer, None, "naive"), words)
    told(lambda: halfmesh.initialize(model.module, optimizer.optimizer, None, None, {}, device="cpu"), words)
    with halfmesh.deferred_init():
        late = MLP()
    told(lambda: convert_to_amp(late, sgd(late.parameters())), "built under halfmesh.deferred_init")
    told(lambda: convert_to_amp(MLP(), sgd(MLP().parameters())), "that the model does not have")
    told(lambda: convert_to_amp(MLP(), None, dtype="fp16"), "dtype='fp16' is not the dtype of a precision; allowed: 'f")


def accumulated_under_ddp(rank, world_size):
    """The first of two backwards is not averaged by DDP: it is with the second."""
    model, optimizer, criterion = converted("naive_fp16")
    parallel = nn.parallel.DistributedDataParallel(model)
    for x, y in batches(4):
        x, y = x[rank::world_size], y[rank::world_size]
        with parallel.no_sync():
            optimizer.backward(criterion(parallel(x[:2]), y[:2]) / 2)
        optimizer.backward(criterion(parallel(x[2:]), y[2:]) / 2)
        optimizer.clip_grad_norm(0.7)
        optimizer.step()
    parallel.load_state_dict(parallel.state_dict())
    with pytest.raises(IncompatibleConfigError, match="DistributedDataParallel cannot average num_losses > 1"):
        converted("apex_o2", num_losses=2)
    return model.state_dict()


@pytest.mark.distributed
def test_under_ddp_with_no_sync_the_ranks_agree():
    first, second = run_ranks(accumulated_under_ddp, 2)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert difference(first, reference(batches(4), max_norm=0.7)) < TOLERANCES["naive_fp16"]
