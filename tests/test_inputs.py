"""What initialize refuses, with the reason and the fix, leaving the caller's objects as they were."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh import inputs
from halfmesh.errors import ConfigError, IncompatibleConfigError, InputError
from tests.support.models import FP16_NAIVE, FP16_TORCH, MLP, adamw, make_data, make_loader, sgd


def refuse(message: str | None, model=None, optimizer=sgd, criterion=None, loader=None, config=None, **options) -> str:
    model = MLP() if model is None else model
    with pytest.raises(InputError, match=message) as caught:
        halfmesh.initialize(model, optimizer, criterion, loader, config or {}, device="cpu", **options)
    return str(caught.value)


def test_models():
    refuse("model: a torch.nn.Module .* is needed, but a int was given", model=3)
    refuse("model: a torch.nn.Module .* is needed, but a str was given", model=lambda: "no model")
    refuse("model: ReLU has no parameters, so there is nothing to train", model=nn.ReLU())
    refuse(r"model: it is wrapped in DataParallel; pass the plain model \(model.module\)", model=nn.DataParallel(MLP()))
    two_devices = MLP()
    two_devices.last.to("meta")
    refuse("model: last.weight, last.bias are on the meta device, without values", model=two_devices)


def test_models_that_are_not_ready():
    refuse("model: weight, bias have no shape yet .lazy modules.; run one forward", model=nn.LazyLinear(3))
    complex_model = MLP()
    complex_model.register_parameter("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    refuse("model: c are complex, for which no precision mode is defined; .*view_as_real", model=complex_model)

    class Sharded(torch.Tensor):
        pass

    sharded = MLP()
    sharded.last.bias = nn.Parameter(torch.zeros(4).as_subclass(Sharded))
    refuse("model: last.bias are Shardeds: the model was sharded already", model=sharded)


def test_values_that_half_precision_cannot_hold():
    model = MLP()
    model.register_buffer("far", torch.tensor([1.0, -7e4, float("inf")]))
    refuse("model: 'far' holds values up to 70000, but float16 ends at 65504; use bf16", model=model, config=FP16_NAIVE)
    halfmesh.initialize(model, sgd, config={"bf16": {"mode": "naive"}})


def test_no_config():
    with pytest.raises(InputError, match=r"no config was given to initialize; .*config=\{\} trains in fp32"):
        halfmesh.initialize(MLP(), sgd)


def test_parameters_on_two_devices(monkeypatch):
    model = MLP()
    monkeypatch.setattr(nn.Parameter, "device", property(lambda p: torch.device("cuda" if p.dim() == 1 else "cpu")))
    found = list(inputs.find_model_problems(model, halfmesh.Recipe(), None))
    assert found == ["model: its parameters are on several devices (cpu, cuda); move it to one: model.to(device)"]


def test_half_precision_parameters():
    half = MLP()
    half.last.half()
    text = refuse(None, model=half, config=FP16_TORCH)
    assert "2 parameter(s) are float16 (last.weight, last.bias), but mode='torch' keeps parameters in float32" in text
    assert "set fp16 = dict(mode='naive')" in text
    text = refuse(None, model=MLP().bfloat16())
    assert "are bfloat16" in text
    assert "the config has neither fp16 nor bf16: without fp32 masters small updates are lost" in text
    assert "set bf16 = dict(mode='naive')" in text
    refuse(
        "but mode='naive' computes in float16; build the model in float32 or float16",
        MLP().bfloat16(),
        config=FP16_NAIVE,
    )


def test_naive_takes_a_model_built_in_its_own_precision():
    engine = halfmesh.initialize(MLP().half(), sgd, config=FP16_NAIVE)
    assert {p.dtype for g in engine.optimizer.param_groups for p in g["params"]} == {torch.float32}


def test_optimizers():
    refuse("optimizer: a torch.optim.Optimizer .* is needed, but a float was given", optimizer=0.1)
    stranger = sgd(MLP(seed=3).parameters())
    text = refuse(None, optimizer=stranger)
    assert re.search(
        r"optimizer: the optimizer holds 9 parameter\(s\) that are not the model's: param_groups\[0\]", text
    )
    for config in (FP16_TORCH, FP16_NAIVE, {}):
        refuse("optimizer: LBFGS.step needs a closure", optimizer=optim.LBFGS, config=config)

    class Unready(optim.Optimizer):
        def __init__(self, params):
            self.param_groups = [{"params": list(params), "lr": 0.1}]

    refuse("optimizer: Unready has not called torch.optim.Optimizer.__init__", optimizer=Unready)

    class OwnClosure(optim.SGD):
        def step(self, closure):
            return closure()

    refuse("optimizer: OwnClosure.step needs a closure", optimizer=lambda p: OwnClosure(p, lr=0.1), config=FP16_NAIVE)


def test_criterion_and_dataloaders():
    refuse("criterion: a callable .* is needed, but a str was given", criterion="cross_entropy")
    refuse(r"criterion: the class MSELoss was given, not a criterion; write MSELoss\(\)", criterion=nn.MSELoss)
    refuse("dataloader: a torch.utils.data.DataLoader is needed, but a list was given", loader=[(1, 2)])
    refuse(
        "dataloader: a Dataset .* has no batch size; pass halfmesh.get_dataloader", loader=TensorDataset(*make_data())
    )
    few = DataLoader(TensorDataset(*make_data(3)), 8, drop_last=True)
    refuse("dataloader: it is empty: .* more samples than batch_size x data ranks", loader=few)
    refuse("eval_dataloader: it is empty", eval_dataloader=few)


def test_schedulers():
    refuse("lr_scheduler: something with step.. is needed, but a float was given", lr_scheduler=0.5)
    model = MLP()
    other = optim.lr_scheduler.StepLR(sgd(model.parameters()), 1)
    refuse("lr_scheduler: it was built on another optimizer", model, sgd(model.parameters()), lr_scheduler=other)
    plateau = optim.lr_scheduler.ReduceLROnPlateau
    refuse("ReduceLROnPlateau.step needs a metric.* lr_interval='manual'", lr_scheduler=plateau)
    halfmesh.initialize(MLP(), sgd, config={"lr_interval": "manual"}, lr_scheduler=plateau)
    step = lambda o: optim.lr_scheduler.StepLR(o, 1)  # noqa: E731
    refuse(
        "lr_interval='epoch' advances it when engine.dataloader ends",
        lr_scheduler=step,
        config={"lr_interval": "epoch"},
    )


def test_all_problems_at_once():
    text = refuse(None, model=MLP().half(), optimizer=optim.LBFGS, criterion=3, loader="data", config=FP16_TORCH)
    assert text.startswith("4 problem(s) in what was passed to initialize:")
    assert [line.split(":")[0].strip(" -") for line in text.splitlines()[1:]] == [
        "model",
        "optimizer",
        "criterion",
        "dataloader",
    ]


def test_a_device_without_the_dtype(monkeypatch):
    def refuse_half(device, dtype):
        if dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nsecond line")

    monkeypatch.setattr(inputs, "probe_dtype", refuse_half)
    with pytest.raises(IncompatibleConfigError) as caught:
        halfmesh.initialize(MLP(), sgd, config=FP16_TORCH, device="cpu")
    assert "device cpu: it cannot multiply matrices in float16" in str(caught.value)
    assert "use bf16, or no half precision" in str(caught.value)
    assert "second line" not in str(caught.value)
    halfmesh.initialize(MLP(), sgd, config={"bf16": {"mode": "torch"}}, device="cpu")


@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW, optim.RMSprop])
def test_an_eps_that_half_precision_loses(make):
    o3 = {"fp16": {"mode": "apex", "opt_level": "O3"}}
    model = MLP()
    with pytest.raises(
        InputError, match=r"eps=1e-08 of param_groups\[0\] is zero in float16.*set eps=1e-4 or so, or keep"
    ):
        halfmesh.initialize(model, make(model.parameters()), None, None, o3, device="cpu")
    for config, eps in ((o3, 1e-4), ({"fp16": {"mode": "apex", "opt_level": "O2"}}, 1e-8), (FP16_NAIVE, 1e-8)):
        model = MLP()
        engine = halfmesh.initialize(model, make(model.parameters(), eps=eps), None, None, config, device="cpu")
        for _ in range(3):
            engine.backward(engine(torch.zeros(2, 8))[:, 0].float().sum() * 1e-3)
            engine.step()
        assert all(value.isfinite().all() for value in engine.state_dict()["model"].values())


def test_the_probe_asks_the_device():
    inputs.probe_dtype(torch.device("cpu"), torch.float16)
    with pytest.raises((RuntimeError, NotImplementedError)):
        inputs.probe_dtype(torch.device("cpu"), torch.uint8)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"paralel": {}}, ConfigError),
        ({"fp16": {"mode": "torch"}, "parallel": {"tensor": 2}}, IncompatibleConfigError),
        ({"fp16": {"mode": "apex"}, "parallel": {"data": "zero1"}}, IncompatibleConfigError),
        ({"resume": "auto"}, IncompatibleConfigError),
        (FP16_NAIVE | {"loss_reduction": "weighted"}, InputError),  # refused for the loader
    ],
)
def test_a_refusal_leaves_everything_untouched(config, error):
    model = MLP()
    optimizer = adamw(model.parameters())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loader = make_loader() if error is not InputError else [1]
    with pytest.raises(error):
        halfmesh.initialize(model, optimizer, None, loader, config, device="cpu")
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert list(vars(optimizer)) == list(vars(adamw(MLP().parameters())))
    optimizer.step()


def test_an_error_after_the_first_change_says_so(monkeypatch):
    monkeypatch.setattr("halfmesh.amp.backend.Backend.convert", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        halfmesh.initialize(MLP(), sgd, config={})
    assert "initialize had begun to change the model and optimizer" in caught.value.__notes__[0]


def test_a_callable_optimizer_may_go_through_the_parameters_twice():
    def groups(params):
        return optim.SGD(
            [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2]}], 0.1
        )

    engine = halfmesh.initialize(MLP(), groups, config={})
    assert [len(g["params"]) for g in engine.optimizer.param_groups] == [3, 6]


def test_callables_are_called_after_the_config_is_checked():
    called = []

    def build():
        called.append(1)
        return MLP()

    with pytest.raises(ConfigError):
        halfmesh.initialize(build, sgd, config={"no_such_key": 1})
    assert not called
    engine = halfmesh.initialize(build, optim.SGD, config={}, lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1))
    assert called == [1]
    assert isinstance(engine.optimizer, optim.SGD)
    assert engine.lr_scheduler.optimizer is engine.optimizer


def test_the_plan_is_printed(capsys, caplog):
    with caplog.at_level("INFO", "halfmesh"):
        halfmesh.initialize(
            MLP(), adamw, None, make_loader(), FP16_NAIVE | {"gradient_accumulation": 4, "clip_grad_norm": 1}
        )
    plan = caplog.text
    numel = sum(p.numel() for p in MLP().parameters())
    for part in (
        "mode naive, compute float16, parameters float16, fp32 masters",
        "dynamic from 256, x2 after 1000 good steps, x0.5 on overflow (hysteresis 2)",
        "pp 1 x dp 1 x tp 1 on cpu",
        "8 per rank x 1 data rank(s) x 4 accumulated = 32 samples per update",
        "AdamW (fused by fused='auto', no host read), clip norm 1, masters' gradients streamed",
        f"{numel * 20 / 1024:.1f} KiB per rank besides activations",
    ):
        assert part in plan
