"""convert_to_amp: precision alone, in a loop of one's own, without initialize, config file or process group."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh import AMP_TYPE, convert_to_amp
from halfmesh.errors import ConfigError, IncompatibleConfigError, InputError
from tests.support.models import (
    COMPUTE_DTYPES,
    FEATURES,
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    make_data,
    reference,
    sgd,
)
from tests.support.ranks import here, run_ranks

FULL, HALF = torch.float32, torch.float16
NOTHING = "there are no gradients to step with"


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
    data, seen = batches(), []
    handle = model.module.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert criterion(model(data[0][0]), data[0][1]).dtype == FULL
    assert seen == [COMPUTE_DTYPES[name]]
    handle.remove()
    train(model, optimizer, criterion, data[:5], max_norm=0.7)
    if optimizer.loss_scale > 1:  # an overflow between good steps
        scale = optimizer.loss_scale
        optimizer.backward(criterion(model(data[0][0]), data[0][1]) * math.inf)
        assert optimizer.step().skipped
        assert optimizer.skipped_steps == 1
        assert optimizer.loss_scale in (scale, scale / 2)  # hysteresis
    results = train(model, optimizer, criterion, data[5:], max_norm=0.7)
    assert all(math.isfinite(result.grad_norm) for result in results)
    assert difference(dict(model.state_dict()), reference(data, max_norm=0.7)) < TOLERANCES[name]
    assert {p.dtype for p in optimizer.master_params()} == {FULL}


@pytest.mark.parametrize("name", ["torch_fp16", "naive_fp16"])
def test_it_resumes_bitwise_and_close_gives_everything_back(name):
    first, second = converted(name, adamw), converted(name, adamw)
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
    optimizer.close()
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(model(x), module(x))  # an fp32 model again
    with pytest.raises(InputError, match="this optimizer is closed"):
        optimizer.backward(criterion(model(x), y))
    with pytest.raises(InputError, match=NOTHING):
        optimizer.step()
    inner = optimizer.optimizer
    assert inner.param_groups[0]["params"][0] is module.first.weight
    module(x).sum().backward()
    inner.step()
    inner.zero_grad()
    assert not torch.equal(module.first.weight, weights["first.weight"])
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


def test_the_wrapper_is_the_model():
    model, optimizer, criterion = converted("apex_o2")
    assert model.module.first is model.first
    assert not model.eval().module.training
    assert model.train().module.training
    with pytest.raises(AttributeError, match="'MLP' object has no attribute 'frist'"):
        model.frist  # noqa: B018
    average = copy.deepcopy(model)
    train(model, optimizer, criterion, batches(1))
    assert not torch.equal(average.state_dict()["first.weight"], model.state_dict()["first.weight"])
    average(batches(1)[0][0])
    for outer, close in ((nn.Sequential(model), 0), (optim.swa_utils.AveragedModel(model), 1e-3)):  # has no masters
        state = {name: value + 1 if value.is_floating_point() else value for name, value in outer.state_dict().items()}
        outer.load_state_dict(state)
        torch.testing.assert_close(dict(outer.state_dict()), state, rtol=close, atol=close)


class Second(nn.Linear):
    """The second version of a layer; weights of the first were half as large."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_wrapper_in_another_module_keeps_the_versions_of_its_modules():
    model = here(nn.Sequential(Second(3, 3)))
    wrapped, *_ = convert_to_amp(model, sgd(model.parameters()), None, "torch", dtype="bfloat16")
    weight, alone = model[0].weight.detach().clone(), here(nn.Sequential(Second(3, 3)))
    outer = nn.ModuleDict({"model": wrapped})
    outer.load_state_dict(outer.state_dict())
    alone.load_state_dict(wrapped.state_dict())
    assert torch.equal(model[0].weight, weight)
    assert torch.equal(alone[0].weight, weight)


def test_scopes_and_lists():
    x = torch.randn(2, FEATURES)
    model, *_ = converted("apex_o1")
    with model.autocast():
        assert (x @ x.T).dtype == HALF
        with model.autocast(enabled=False):
            assert (x @ x.T).dtype == FULL
        model.casts.register_float_function(torch.Tensor, "matmul")
        assert x.matmul(x.T).dtype == FULL
    assert converted("naive_fp16")[0].casts is None


def told(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_misuse():
    model, optimizer, criterion = converted("torch_fp16")
    x, y = make_data(4)
    told(optimizer.step, r"step\(\) was called before backward\(loss\).*Replace loss\.backward\(\)")
    criterion(model(x), y).backward()  # unscaled: it would be divided by the scale
    told(optimizer.step, NOTHING)
    told(lambda: optimizer.clip_grad_norm(1.0), "clip_grad_norm was called before backward")
    told(optimizer.optimizer.step, r"optimizer.step\(\) was called outside.*that convert_to_amp returned")
    told(lambda: optimizer.backward(model(x)), "backward takes a scalar loss tensor, but got shape")
    loss = criterion(model(x), y)
    told(lambda: optimizer.backward(loss, loss_id=1), r"loss_id=1 is not allowed with 1 loss scale")
    told(lambda: optimizer.backward(loss), "The update would divide them by the loss scale")
    optimizer.zero_grad()
    optimizer.backward(loss)
    told(
        lambda: optimizer.step(lambda: loss),
        r"optimizer.step\(<function .* it takes no closure.* call backward\(loss\)",
    )
    assert not optimizer.step(closure=None).skipped
    optimizer.backward(criterion(model(x), y))
    optimizer.zero_grad()
    told(optimizer.step, NOTHING)
    optimizer.backward(criterion(model(x), y))
    before = copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())  # the gradients were of another scale
    told(optimizer.step, NOTHING)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    inner = optimizer.optimizer.state_dict()
    told(lambda: optimizer.load_state_dict(inner), "not the state of an optimizer: pass what opt")
    other = converted("apex_o1", num_losses=2)[1].state_dict()
    told(lambda: optimizer.load_state_dict(other), r"saved with 2 loss scales, but this run trains with 1;")
    for theirs in (optimizer, optimizer.optimizer):  # a cell of a notebook that is run twice
        words = "another engine or convert_to_amp uses it"
        told(lambda own=theirs: convert_to_amp(model, own, None, "naive"), words)
        told(lambda own=theirs: halfmesh.initialize(model.module, own, None, None, {}, device="cpu"), words)
    model, optimizer, criterion = converted("apex_o2")
    optimizer.backward(criterion(model(x), y))
    told(lambda: list(optimizer.master_params()), r"or clip_grad_norm of convert_to_amp's optimizer")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "apx"}, ConfigError, "no AMP mode named 'apx'; did you mean 'apex'? Registered: torch, naive, apex"),
        ({"amp_config": {"init_scal": 2.0}}, ConfigError, "fp16.init_scal: unknown key; did you mean 'init_scale'?"),
        ({"mode": "apex", "dtype": "bfloat16"}, IncompatibleConfigError, "apex has no bf16; use bf16 = dict(mode="),
        ({"dtype": "fp16"}, InputError, "dtype='fp16' is not the dtype of a precision; allowed: 'float16', 'bfloat16'"),
        ({"dtype": "bfloat16", "amp_config": {"init_scale": 2.0}}, ConfigError, "the loss is not scaled; remove init"),
        (
            {"model": 3},
            InputError,
            "model: expected a torch.nn.Module (or a callable that returns one), but got",
        ),
        ({"optimizer": None}, InputError, "optimizer: expected a torch.optim.Optimizer over model.parameters()"),
        ({"optimizer": sgd(MLP().parameters())}, InputError, "that the model does not have"),
        ({"criterion": nn.MSELoss}, InputError, "the class MSELoss was given, not a criterion; write MSELoss()"),
        ({"amp_config": {"mode": "naive"}}, TypeError, "multiple values for keyword argument 'mode'"),
    ],
)
def test_rejections_leave_everything_untouched(arguments, error, message):
    model = MLP()
    optimizer = sgd(model.parameters())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(error) as raised:
        convert_to_amp(**{"model": model, "optimizer": optimizer, "mode": AMP_TYPE.TORCH} | arguments)
    assert message in str(raised.value)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


def accumulated_under_ddp(rank, world_size):
    """The first of two backwards is not averaged by DDP: it is with the second."""
    results = {}
    for name in ("torch_fp16", "naive_fp16"):
        model, optimizer, criterion = converted(name)
        parallel = nn.parallel.DistributedDataParallel(model)
        for x, y in batches(4):
            x, y = x[rank::world_size], y[rank::world_size]
            with parallel.no_sync():
                optimizer.backward(criterion(parallel(x[:2]), y[:2]) / 2)
            optimizer.backward(criterion(parallel(x[2:]), y[2:]) / 2)
            optimizer.clip_grad_norm(0.7)
            optimizer.step()
        parallel.load_state_dict(parallel.state_dict())
        results[name] = model.state_dict()
    with pytest.raises(IncompatibleConfigError, match="num_losses=2 with a dynamic scale for each cannot be averaged"):
        converted("apex_o2", num_losses=2)
    return results


@pytest.mark.distributed
def test_under_ddp_with_no_sync_the_ranks_agree():
    first, second = run_ranks(accumulated_under_ddp, 2)
    for name, weights in first.items():
        torch.testing.assert_close(second[name], weights, rtol=0, atol=0)
        assert difference(weights, reference(batches(4), max_norm=0.7)) < TOLERANCES[name]
