"""What initialize rejects, with the reason and the fix, leaving the caller's objects as they were."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import TensorDataset

import halfmesh
from halfmesh.errors import ConfigError, IncompatibleConfigError, InputError
from tests.support.models import FP16_NAIVE, FP16_TORCH, MLP, adamw, make_data, make_loader, said, sgd
from tests.support.ranks import run_ranks

NAIVE_BF16 = {"bf16": {"mode": "naive"}}


def start(model=None, optimizer=sgd, criterion=None, loader=None, config=None, **options):
    model = MLP() if model is None else model
    return halfmesh.initialize(model, optimizer, criterion, loader, config or {}, device="cpu", **options)


def changed(change):
    model = MLP()
    change(model)
    return model


def add_complex(model):
    model.c = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def quantized():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)).requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), lambda module, name: name == "0")
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
    """As nanochat's and modded-nanogpt's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                dist.reduce_scatter_tensor(param.grad[:1], param.grad, op=dist.ReduceOp.AVG)


class DistAdamW(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        self.finish([dist.all_reduce(p.grad, async_op=True) for group in self.param_groups for p in group["params"]])


class Prodigy(optim.SGD):
    """Sums a number over the ranks. Call all_reduce(grads) yourself if you train on several ranks."""

    def step(self, closure=None):
        total = sum(float(p.grad.norm()) for group in self.param_groups for p in group["params"])
        assert total, "dist.all_reduce(p.grad) first"
        if closure is None and dist.is_initialized():
            dist.all_reduce(torch.tensor([total]))  # not dist.all_reduce(p.grad)
        return super().step(closure)


STEP_LR = lambda o: optim.lr_scheduler.StepLR(o, 1)  # noqa: E731
PLATEAU = optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model: expected a torch.nn.Module .*, but got an int"),
        ({"model": lambda: "no model"}, "model: expected a torch.nn.Module .*, but got a str"),
        ({"model": nn.DataParallel(MLP())}, "model: pass model.module, not DataParallel"),
        ({"model": changed(lambda m: m.last.to("meta"))}, "model: last.weight, last.bias are on the meta device"),
        ({"model": changed(add_complex)}, "model: c are complex; .*view_as_real"),
        ({"model": quantized(), "config": NAIVE_BF16}, "model: 0.weight are Int8Tensors, already quantized or sharded"),
        (
            {"model": changed(lambda m: m.last.half()), "config": FP16_TORCH},
            "2 parameter.* float16 .* they must be in float32 or float64: .* or set mode='naive'",
        ),
        ({"optimizer": 0.1}, "optimizer: expected a torch.optim.Optimizer .*, but got a float"),
        ({"optimizer": sgd(MLP(seed=3).parameters())}, r"holds 9 parameters that .* not have: param_groups\[0\]"),
        ({"optimizer": Wrapper}, "Wrapper does not call .*Optimizer.__init__, .*pass the inner one"),
        ({"optimizer": optim.LBFGS}, "LBFGS.step needs a closure, .*SGD, Adam or AdamW.*with LBFGS without"),
        ({"optimizer": lambda p: NeedsClosure(p, lr=0.1)}, "NeedsClosure.step needs a closure, to compute the loss"),
        ({"criterion": "cross_entropy"}, "criterion: expected a callable .*, but got a str"),
        ({"criterion": nn.MSELoss}, r"the class MSELoss was given, not a criterion; write MSELoss\(\)"),
        ({"loader": TensorDataset(*make_data())}, "but got a TensorDataset; .* halfmesh.get_dataloader"),
        ({"lr_scheduler": STEP_LR(sgd(MLP().parameters()))}, "lr_scheduler: it was built on another optimizer"),
        ({"lr_scheduler": PLATEAU}, "ReduceLROnPlateau.step needs a metric.* lr_interval='manual'"),
        ({"lr_scheduler": STEP_LR, "config": {"lr_interval": "epoch"}}, "advances it when engine.dataloader ends"),
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


def test_values_that_half_precision_cannot_hold():
    model = MLP()
    model.register_buffer("far", torch.tensor([1.0, -7e4, float("inf")]))
    with pytest.raises(InputError, match="'far' holds values up to 70000, above the maximum of float16; use"):
        start(model, config=FP16_NAIVE)
    start(model, config=NAIVE_BF16)


def test_all_problems_at_once():
    with pytest.raises(InputError) as caught:
        start(MLP().half(), 0.1, 3, "data", FP16_TORCH)
    first, *lines = str(caught.value).splitlines()
    assert first == "4 problems in what was passed to initialize:"
    assert [line.split(":")[0].strip(" -") for line in lines] == ["model", "optimizer", "criterion", "dataloader"]


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
    assert halfmesh.initialize(MLP(), sgd, device="cpu").config == halfmesh.load_config({})
    with halfmesh.launch_from_torch(FP16_NAIVE, device="cpu", verbose=False) as launch:
        with pytest.raises(InputError, match="would ignore that of the launch; pass"):
            halfmesh.initialize(MLP(), sgd, device="cpu")
        assert start(config=launch).config.fp16 is not None


def test_callables_are_called_after_the_config_is_checked():
    called = []
    with pytest.raises(ConfigError):
        start(lambda: called.append(1), config={"no_such_key": 1})
    assert not called
    engine = start(MLP, lr_scheduler=STEP_LR)
    assert engine.lr_scheduler.optimizer is engine.optimizer
