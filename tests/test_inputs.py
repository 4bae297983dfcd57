"""What initialize rejects, with the reason and the fix, leaving the caller's objects as they were."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.amp.recipe import Recipe
from halfmesh.engine import inputs
from halfmesh.errors import ConfigError, IncompatibleConfigError, InputError
from tests.support.models import FP16_NAIVE, FP16_TORCH, MLP, adamw, make_data, make_loader, said, sgd
from tests.support.ranks import run_ranks

NAIVE_BF16 = {"bf16": {"mode": "naive"}}


def start(model=None, optimizer=sgd, criterion=None, loader=None, config=None, **options):
    model = MLP() if model is None else model
    return halfmesh.initialize(model, optimizer, criterion, loader, config or {}, device="cpu", **options)


def complex_model():
    model = MLP()
    model.register_parameter("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


def half_on_meta():
    model = MLP()
    model.last.to("meta")
    return model


def last_layer_in_half():
    model = MLP()
    model.last.half()
    return model


class Wrapper(optim.Optimizer):
    """Steps another optimizer, and never called Optimizer.__init__."""

    def __init__(self, params):
        self.inner = sgd(params)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, {}, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        return self.inner.step(closure)


class NeedsClosure(optim.SGD):
    """As SAM."""

    def step(self, closure=None):
        assert closure is not None, "SAM needs one"
        return super().step(closure)


class DistMuon(optim.SGD):
    """As nanochat's and modded-nanogpt's, and as those that sum small gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                dist.reduce_scatter_tensor(param.grad[:1], param.grad, op=dist.ReduceOp.AVG)


class DistAdamW(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        self.finish([dist.all_reduce(p.grad, async_op=True) for group in self.param_groups for p in group["params"]])

    def finish(self, works):
        for work in works:
            work.wait()


class Prodigy(optim.SGD):
    """Sums a number over the ranks. Call all_reduce(grads) yourself if you train on several ranks."""

    def step(self, closure=None):
        total = sum(float(p.grad.norm()) for group in self.param_groups for p in group["params"])
        assert total, "dist.all_reduce(p.grad) first"
        if dist.is_initialized():
            dist.all_reduce(torch.tensor([total]))  # not dist.all_reduce(p.grad)
        return super().step(closure)


class Counted(DataLoader):
    """Counts its batches with an iterator, which is not that of the batches."""

    def __init__(self):
        super().__init__(TensorDataset(*make_data(8)), 4)
        self.count = itertools.count()

    def __iter__(self):
        return (batch for batch, _ in zip(super().__iter__(), self.count, strict=False))


STEP_LR = lambda o: optim.lr_scheduler.StepLR(o, 1)  # noqa: E731
PLATEAU = optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model: expected a torch.nn.Module .*, but got an int"),
        ({"model": lambda: "no model"}, "model: expected a torch.nn.Module .*, but got a str"),
        ({"model": nn.DataParallel(MLP())}, r"wrapped in DataParallel; pass the plain model \(model.module\)"),
        ({"model": half_on_meta()}, "model: last.weight, last.bias are on the meta device, without values"),
        ({"model": complex_model()}, "model: c are complex, .*view_as_real"),
        (
            {"model": last_layer_in_half(), "config": FP16_TORCH},
            r"2 parameter.* float16 .* they must be in float32 or float64: .* fp16 = dict\(mode='naive'\)",
        ),
        (
            {"model": MLP().bfloat16(), "config": FP16_NAIVE},
            "they must be in float16 or float32: .*build the model in float16 or float32, or set bf16 = dict",
        ),
        ({"optimizer": 0.1}, "optimizer: expected a torch.optim.Optimizer .*, but got a float"),
        (
            {"optimizer": sgd(MLP(seed=3).parameters())},
            r"holds 9 parameters that the model does not have: param_groups\[0\]",
        ),
        ({"optimizer": Wrapper}, r"Wrapper does not call .*Optimizer.__init__, .*pass the inner one"),
        ({"optimizer": optim.LBFGS}, "LBFGS.step needs 'closure', .*SGD, Adam, AdamW.*with LBFGS without"),
        ({"optimizer": lambda p: NeedsClosure(p, lr=0.1)}, "NeedsClosure.step needs 'closure', to compute the loss"),
        ({"criterion": "cross_entropy"}, "criterion: expected a callable .*, but got a str"),
        ({"criterion": nn.MSELoss}, r"the class MSELoss was given, not a criterion; write MSELoss\(\)"),
        (
            {"loader": [(1, 2)]},
            "dataloader: expected a torch.utils.data.DataLoader, but got a list; for a dataset, write",
        ),
        ({"loader": TensorDataset(*make_data())}, "but got a TensorDataset; .* halfmesh.get_dataloader"),
        ({"lr_scheduler": STEP_LR(sgd(MLP().parameters()))}, "lr_scheduler: it was built on another optimizer"),
        ({"lr_scheduler": PLATEAU}, "ReduceLROnPlateau.step needs a metric.* lr_interval='manual'"),
        (
            {"lr_scheduler": STEP_LR, "config": {"lr_interval": "epoch"}},
            "lr_interval='epoch' advances it when engine.dataloader ends",
        ),
    ],
)
def test_rejections(options, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        start(**options)


def optimizers_on_ranks(rank, world_size):
    """What each is rejected with."""
    return [said(start, optimizer=lambda p, kind=kind: kind(p, lr=0.1)) for kind in (DistMuon, DistAdamW, Prodigy)]


@pytest.mark.distributed
def test_an_optimizer_that_reduces_gradients_is_rejected_on_several_ranks():
    for muon, its_adamw, prodigy in run_ranks(optimizers_on_ranks, 2):
        assert "DistMuon reduces gradients or weights over ranks itself, which halfmesh already does" in muon
        assert "data='zero1' shards its state" in its_adamw
        assert prodigy == "nothing"
    assert optimizers_on_ranks(0, 1) == ["nothing"] * 3, "in one process nothing is reduced twice"


def test_loaders_of_timm():
    """They go on with one iterator for all epochs."""
    timm_loader = pytest.importorskip("timm.data.loader")
    several = timm_loader.MultiEpochsDataLoader(TensorDataset(*make_data(8)), batch_size=4)
    around = timm_loader.PrefetchLoader(several, device=torch.device("cpu"))
    words = r"(?s)dataloader: MultiEpochsDataLoader keeps one iterator .*persistent_workers=True"
    for options in ({"loader": several}, {"eval_dataloader": several}, {"loader": around}):
        with pytest.raises(InputError, match=words):
            start(**options)
    del several.iterator  # not begun, but its sampler has no end
    with pytest.raises(InputError, match=words):
        start(loader=several)


def test_a_loader_may_hold_an_iterator_of_something_else():
    with start(loader=Counted()) as engine:
        assert len(list(engine.dataloader)) == 2


def test_values_that_half_precision_cannot_hold():
    model = MLP()
    model.register_buffer("far", torch.tensor([1.0, -7e4, float("inf")]))
    with pytest.raises(InputError, match="'far' holds values up to 70000, but the maximum of float16 is 65504; use"):
        start(model, config=FP16_NAIVE)
    start(model, config=NAIVE_BF16)


def test_parameters_on_two_devices(monkeypatch):
    model = MLP()
    monkeypatch.setattr(nn.Parameter, "device", property(lambda p: torch.device("cuda" if p.dim() == 1 else "cpu")))
    with pytest.raises(InputError, match=r"its parameters are on several devices \(cpu, cuda\); load it without dev"):
        start(model)


def test_naive_takes_a_model_built_in_its_own_precision():
    engine = start(MLP().half(), config=FP16_NAIVE)
    assert {p.dtype for g in engine.optimizer.param_groups for p in g["params"]} == {torch.float32}


def test_all_problems_at_once():
    with pytest.raises(InputError) as caught:
        start(MLP().half(), 0.1, 3, "data", FP16_TORCH)
    first, *lines = str(caught.value).splitlines()
    assert first == "4 problems in what was passed to initialize:"
    assert [line.split(":")[0].strip(" -") for line in lines] == ["model", "optimizer", "criterion", "dataloader"]


def test_a_device_without_the_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    find = inputs.find_device_problem
    gpu, bf16, fp16 = (
        torch.device("cuda:1"),
        Recipe(torch.bfloat16, autocast=True),
        Recipe(torch.float16, autocast=True),
    )
    assert find(gpu, bf16).startswith(
        "device cuda:1: it has no bfloat16 matrix products (compute capability below 8.0)"
    )
    assert find(gpu, fp16) is find(torch.device("cpu"), bf16) is None


@pytest.mark.parametrize("make", [optim.Adam, optim.RMSprop])
def test_an_eps_that_half_precision_loses(make):
    o3 = {"fp16": {"mode": "apex", "opt_level": "O3"}}
    with pytest.raises(InputError, match=r"eps=1e-08 of param_groups\[0\] rounds to zero in float16.*set eps to about"):
        start(optimizer=make, config=o3)
    start(optimizer=lambda p: make(p, eps=1e-4), config=o3)
    start(optimizer=make, config=FP16_NAIVE)  # which has masters


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"paralel": {}}, ConfigError),
        ({"fp16": {"mode": "torch"}, "parallel": {"tensor": 2}}, IncompatibleConfigError),
        (FP16_NAIVE | {"loss_reduction": "weighted"}, InputError),  # rejected for the loader
    ],
)
def test_a_rejection_leaves_everything_untouched(config, error):
    model = MLP()
    optimizer = adamw(model.parameters())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(error):
        start(model, optimizer, loader=[1] if error is InputError else make_loader(), config=config)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    optimizer.step()


def test_no_config_is_fp32_but_that_of_a_launch_is_not_forgotten(monkeypatch):
    monkeypatch.setattr("halfmesh.engine.launch._launched", [])  # of other tests in this process

    def make(**options):
        return halfmesh.initialize(MLP(), sgd, device="cpu", **options)

    assert make().config == halfmesh.load_config({})
    with pytest.raises(InputError, match="it holds 9 parameters that the model does not have"):
        halfmesh.initialize(nn.ReLU(), adamw(MLP().parameters()))
    with halfmesh.launch_from_torch({}, device="cpu", verbose=False):
        make()
    with halfmesh.launch_from_torch(FP16_NAIVE, device="cpu", verbose=False) as launch:
        with pytest.raises(InputError, match="launched with; pass the"):
            make()
        assert make(config={}).config.fp16 is None
        assert make(config=launch).config.fp16 is not None
    make()


def test_callables_are_called_after_the_config_is_checked():
    called = []

    def build():
        called.append(1)
        return MLP()

    def groups(params):  # goes through them twice
        first = [p for p in params if p.dim() > 1]
        return optim.SGD([{"params": first}, {"params": [p for p in params if p.dim() < 2]}], 0.1)

    with pytest.raises(ConfigError):
        start(build, config={"no_such_key": 1})
    assert not called
    engine = start(build, groups, lr_scheduler=STEP_LR)
    assert called == [1]
    assert [len(g["params"]) for g in engine.optimizer.param_groups] == [3, 6]
    assert engine.lr_scheduler.optimizer is engine.optimizer


@pytest.mark.parametrize(
    ("name", "meant"), [("train_dataloader", "dataloader"), ("loss_fn", "criterion"), ("lr_schedular", "lr_scheduler")]
)
def test_an_unknown_argument_names_the_one_that_is_meant(name, meant):
    with pytest.raises(TypeError, match=f"has no argument '{name}'; did you mean '{meant}'"):
        halfmesh.initialize(MLP(), sgd, **{name: None})


def test_the_plan_is_printed(caplog):
    with caplog.at_level("INFO", "halfmesh"):
        config = FP16_NAIVE | {"gradient_accumulation": 4, "clip_grad_norm": 1}
        start(optimizer=adamw, loader=make_loader(), config=config)
    numel = sum(p.numel() for p in MLP().parameters())
    for part in (
        "mode naive, compute float16, parameters float16, fp32 masters",
        "dynamic from 256, x2 after 1000 good steps, x0.5 on overflow (hysteresis 2)",
        "pp 1 x dp 1 x tp 1 on cpu",
        "8 per rank x 1 data rank x 4 accumulated = 32 samples per update",
        "AdamW (fused automatically, no host read), clip norm 1",
        f"{numel * 20 / 1024:.1f} KiB per rank without activations",
    ):
        assert part in caplog.text


def test_quantised_weights_are_rejected_with_the_reason():
    quantisation = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)).requires_grad_(False)
    quantisation.quantize_(model, quantisation.Int8WeightOnlyConfig(), lambda module, name: name == "0")
    optimizer = torch.optim.SGD(model[1].requires_grad_(True).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"0.weight are quantized weights \(Int8Tensor\), which"):
        halfmesh.initialize(model, optimizer, nn.MSELoss(), None, NAIVE_BF16, device="cpu")
