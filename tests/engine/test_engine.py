"""The loop in one process: parity with plain torch, dtypes, misuse."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.errors import InputError, NonFiniteError
from tests.support.models import (
    COMPUTE_DTYPES,
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    MatmulDtypes,
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
def test_parity_with_a_plain_fp32_loop(mode):
    """10 steps with a growth, an overflow, and clipping that bites in some steps and not in others."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()} | {"clip_grad_norm": 0.7}
    engine = make_engine(config, loader=make_loader(80))
    overflows = engine.loss_scale > 1
    norms, scales, step = [], [], 0
    for x, y in engine.dataloader:
        if step == 5 and overflows:  # one batch that overflows, between two good ones
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y) * math.inf)
            assert engine.step().skipped
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        result = engine.step()
        norms.append(result.grad_norm)
        scales.append(result.loss_scale)
        step += 1
    assert step == 10
    assert min(norms) < 0.7 < max(norms)
    if overflows:
        assert len(set(scales)) > 1
    expected = reference(make_loader(80), max_norm=0.7)
    assert difference(full_weights(engine), expected) < TOLERANCES[mode]
    assert engine.skipped_steps == int(overflows)
    assert engine.global_step == 10 + int(overflows)


@pytest.mark.parametrize("mode", MODES)
def test_matrix_products_run_in_the_dtype_asked_for(mode):
    engine = make_engine(MODES[mode])
    expected = COMPUTE_DTYPES[mode]
    x, y = next(iter(engine.dataloader))
    with MatmulDtypes() as training:
        output = engine(x)
        engine.backward(engine.criterion(output, y))
    assert training.dtypes == {expected}
    engine.eval()
    with torch.no_grad(), MatmulDtypes() as evaluating:
        engine(x)
    assert evaluating.dtypes == {expected}
    weights = torch.float32 if mode in ("torch_fp16", "torch_bf16", "apex_o1") else expected
    assert {p.dtype for p in engine.model.parameters()} == {weights}
    autocast = mode in ("torch_fp16", "torch_bf16", "apex_o1")
    assert output.dtype == (expected if autocast else torch.float32)
    with engine.autocast():
        assert torch.is_autocast_enabled("cpu") == autocast


@pytest.mark.parametrize("mode", ["torch_fp16", "apex_o1"])
def test_custom_regions_are_honoured(mode):
    class Careful(MLP):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.first(x)
                self.seen = x.dtype
            return self.last(self.norm(x))

    engine = make_engine(MODES[mode], model=Careful())
    assert engine(torch.randn(2, 8)).dtype == torch.float16
    assert engine.model.seen == torch.float32


def test_the_criterion_runs_in_the_forward_scope():
    seen = []

    def criterion(output, target):
        seen.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.cross_entropy(output, target)

    for config in (FP16_TORCH, FP16_NAIVE):
        engine = make_engine(config, criterion=criterion)
        x, y = next(iter(engine.dataloader))
        assert engine.criterion(engine(x), y).dtype == torch.float32
    assert seen == [True, False]


class OwnLoss(MLP):
    def forward(self, x, y):
        return {"loss": nn.functional.cross_entropy(super().forward(x), y)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("debug", [None, "sync"])
def test_any_name_of_an_argument(mode, debug):
    class Scaled(MLP):
        def forward(self, model, call):
            return super().forward(model) * call

    def loss(output, criterion, call, model):
        return nn.functional.mse_loss(output * call, criterion.to(output.dtype)) * model

    engine = make_engine(MODES[mode] | {"debug": debug}, model=Scaled(), criterion=loss)
    x, _ = next(iter(engine.dataloader))
    target = torch.zeros_like(engine(model=x, call=1.0), dtype=torch.float32)
    engine.backward(engine.criterion(engine(model=x, call=1.0), criterion=target, call=1.0, model=1.0))
    assert engine.step() is not None


def test_a_models_own_fp16_loss_caps_the_scale(caplog):
    engine = make_engine({"fp16": {"mode": "naive"}}, model=OwnLoss())
    x, y = make_data(8)
    with caplog.at_level("WARNING", "halfmesh"):
        for _ in range(2):
            engine.backward(engine(x, y)["loss"])
            assert not engine.step().skipped
            engine.zero_grad()
    assert engine.loss_scale == 2.0**15
    assert caplog.text.count("the loss scale is kept at or below 32768: the loss itself is fp16") == 1
    static = make_engine({"fp16": {"mode": "naive", "loss_scale": 65536.0}}, model=OwnLoss())
    with pytest.raises(InputError, match="the static loss_scale 65536 cannot be used"):
        static.backward(static(x, y)["loss"])
    untouched = make_engine({"fp16": {"mode": "naive"}})
    untouched.backward(untouched.criterion(untouched(x), y))
    assert untouched.loss_scale == 2.0**16


def test_a_scope_around_the_loop_does_not_keep_old_weights():
    engine = make_engine(FP16_TORCH)
    x, y = make_data(8)
    with engine.autocast():
        for _ in range(3):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            engine.zero_grad()
    assert difference(full_weights(engine), reference([(x, y)] * 3)) < 2e-4


def test_parameters_frozen_and_added_later():
    model = MLP()
    model.last.requires_grad_(False)
    engine = make_engine(FP16_NAIVE, model=model, optimizer=lambda _: sgd([*model.first.parameters()]))
    before = copy.deepcopy(model.state_dict())
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"first.weight", "first.bias"}
    model.last.requires_grad_(True)
    engine.optimizer.add_param_group({"params": list(model.last.parameters())})
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert not torch.equal(model.last.weight, before["last.weight"])
    assert {p.dtype for g in engine.optimizer.param_groups for p in g["params"]} == {torch.float32}


def test_nan_from_the_first_step_stops_with_a_diagnosis():
    class Broken(MLP):
        def forward(self, x):
            return super().forward(x) * self.norm.weight.new_tensor(math.nan)

    engine = make_engine(FP16_NAIVE | {"max_consecutive_skips": 12}, model=Broken())
    with pytest.raises(NonFiniteError) as caught:
        train(engine, epochs=10)
    message = str(caught.value)
    assert "12 updates in a row had gradients with inf or nan" in message
    assert "first parameter with a non-finite gradient is 'first.weight'" in message
    assert "has reached its floor, 1" in message
    assert engine.global_step == 11


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"), r"scalar loss, but its shape is \(8,\)"),
        (lambda o, y: 1.0, "takes the loss tensor, but a float was given"),
        (lambda o, y: (o.sum(), 8), r"a tuple was given; for a criterion that returns \(sum, weight\)"),
        (lambda o, y: o.argmax(), "floating-point loss, but its dtype is torch.int64"),
        (lambda o, y: o.sum().detach(), "the loss has no graph to run backward through"),
    ],
)
def test_losses_that_are_not_scalars_with_a_graph(loss, message):
    engine = make_engine(criterion=loss)
    x, y = make_data(8)
    with pytest.raises(InputError, match=message):
        engine.backward(engine.criterion(engine(x), y))


def test_weighted_needs_a_pair():
    engine = make_engine({"loss_reduction": "weighted"})
    x, y = make_data(8)
    with pytest.raises(InputError, match=r"takes \(sum, weight\) from the criterion, but a Tensor was given"):
        engine.backward(engine.criterion(engine(x), y))


def test_misuse_of_the_engine():
    engine = make_engine(criterion=None)
    with pytest.raises(TypeError, match="initialize returns one Engine, not Colossal-AI's tuple"):
        _model, _optimizer, *_ = engine
    with pytest.raises(InputError, match="no criterion was given to initialize"):
        engine.criterion(1, 2)
    with pytest.raises(InputError, match=r"engine.step\(\) was called before engine.backward"):
        engine.step()
    with pytest.raises(InputError, match="loss_id=1 was given, but there is one loss; only mode='apex' has several"):
        engine.backward(torch.tensor(1.0), loss_id=1)


def test_a_scheduler_stepped_by_hand_as_well():
    engine = make_engine(lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    engine.lr_scheduler.step()
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(
        InputError, match=r"lr_scheduler.step\(\) was called outside the engine, .* lr_interval='manual'"
    ):
        engine.step()


def test_two_engines_on_one_model_do_not_clear_each_others_gradients():
    def run(with_engines):
        model = MLP()
        parts = [list(model.first.parameters()), list(model.last.parameters())]
        optimizers = [optim.SGD(part, lr=0.1) for part in parts]
        engines = [make_engine(model=model, optimizer=o) for o in optimizers] if with_engines else []
        x, y = make_data(8)
        for _ in range(2):
            for i, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                engines[i].backward(loss) if with_engines else loss.backward()
            for i, optimizer in enumerate(optimizers):
                engines[i].step() if with_engines else optimizer.step()
        return model.state_dict()

    torch.testing.assert_close(run(True), run(False))


def test_retain_graph():
    engine = make_engine()
    x, y = make_data(8)
    loss = engine.criterion(engine(x), y)
    engine.backward(loss * 0.5, retain_graph=True)
    engine.backward(loss * 0.5)
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


def test_assigning_parameters_is_refused():
    engine = make_engine()
    with pytest.raises(
        InputError, match=r"load_state_dict\(..., assign=True\) would replace parameters that the optimizer"
    ):
        engine.model.load_state_dict(MLP(seed=3).state_dict(), assign=True)


def test_loaders_that_were_not_given():
    engine = halfmesh.initialize(MLP(), sgd, config={})
    with pytest.raises(InputError, match="no dataloader was given to initialize"):
        iter(engine.dataloader)
    with pytest.raises(InputError, match="no eval_dataloader was given to initialize"):
        iter(engine.eval_dataloader)


def test_two_engines_in_one_process():
    first, second = make_engine(FP16_NAIVE), make_engine({"gradient_accumulation": 2})
    for (x, y), _ in zip(first.dataloader, range(4), strict=False):
        for engine in (first, second):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    assert (first.global_step, second.global_step) == (4, 2)
    assert (first.loss_scale, second.loss_scale) == (256.0, 1.0)
