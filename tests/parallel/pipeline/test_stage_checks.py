"""What a pipeline rejects before anything runs, and leaves the model alone."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from halfmesh.parallel.pipeline.partition import Call, Piece
from halfmesh.parallel.pipeline.stage import ForwardContext, StageModule
from halfmesh.utils.torch_private import shapes_only
from tests.support.models import CLASSES, FEATURES, make_loader, sgd
from tests.support.pipeline_parts import pipe


def deep(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *more, nn.Linear(16, CLASSES))


class Unknown(nn.Sequential):
    """No partitioner knows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def unknown() -> nn.Module:
    return Unknown(*deep())


class NormTwice(Unknown):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[3](self[2](self[1](self[2](self[0](x)))))


def compiled() -> nn.Module:
    model = deep()
    model[0].compile()
    return model


def hooked() -> nn.Module:
    model = deep()
    model.register_forward_hook(lambda *_: None)
    return model


class Lamb(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["max_grad_norm"] = 1.0


def with_loss() -> nn.Module:
    model = deep()
    model.add_module("loss", nn.Linear(4, 4))
    return model


SPARSE = "0: sparse=True and scale_grad_by_freq=True do not work under a pipeline"
REJECTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch": (
        deep,
        pipe(microbatches=3),
        "microbatches=3 does not divide the dataloader's batch_size=8",
    ),
    "too few blocks": (deep, pipe(4, 4), "pipeline.size=4 needs 4 stages, but Sequential has only the pieces 0, 1, 2"),
    "no partitioner": (
        unknown,
        pipe(),
        "no partitioner knows Unknown; name the modules that start a stage, as in partition=('1',)",
    ),
    "wrong point": (unknown, pipe(partition=("block.3",)), "'block.3' is not a module of the model"),
    "too many points": (unknown, pipe(partition=("1", "2")), "partition: 2 split points, but pipeline.size=2 needs 1"),
    "non_split": (deep, pipe(non_split=("inputs",)), "has an argument 'inputs'; did you mean 'input'?"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(8, 16, sparse=True), nn.Linear(16, CLASSES)), pipe(), SPARSE),
    "SyncBatchNorm": (lambda: deep(nn.SyncBatchNorm(16)), pipe(), "2: SyncBatchNorm needs all ranks"),
    "statistics of two stages": (
        lambda: NormTwice(*deep(nn.BatchNorm1d(16))),
        pipe(partition=("1",)),
        "2.running_mean, 2.running_var: stages that share a norm would each keep running statistics",
    ),
    "compiled": (compiled, pipe(), "a compiled model cannot be split into stages; pass it uncompiled"),
    "hooks": (hooked, pipe(), "the model itself: it has hooks, but stages do not call it"),
    "criterion": (with_loss, pipe(), "criterion: no stage would have loss.weight, loss.bias, weights of the model"),
    "optimizer": (deep, pipe(), "optimizer: max_grad_norm=1.0 uses all parameters; set it to None, and clip_grad_norm"),
}


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, whose rendezvous would never be answered."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("case", REJECTED)
def test_a_rejection_leaves_the_model_alone(case):
    make_model, config, message = REJECTED[case]
    model = make_model()
    optimizer = (Lamb if case == "optimizer" else sgd)(model.parameters())
    criterion = getattr(model, "loss", nn.functional.cross_entropy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatibleConfigError, match=re.escape(message)):
        halfmesh.initialize(model, optimizer, criterion, make_loader(), config, device="cpu")
    assert not dist.is_initialized()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


KEPT: dict[int, torch.Tensor] = {}


def test_a_tensor_without_data_that_is_kept_in_a_global_is_rejected():
    def keep(x: torch.Tensor) -> torch.Tensor:
        return x + KEPT.setdefault(len(x), torch.ones(len(x), 1))

    piece = Piece("all", (), lambda model, call, x: keep(call.args[0]))
    stage = StageModule(nn.Linear(1, 1), [piece], 0, 1, ForwardContext(nullcontext, (), nullcontext))
    with shapes_only():
        keep(torch.ones(2, 1))
    with pytest.raises(InputError, match="keeps a tensor outside the model"):
        stage.compute(Call((torch.ones(2, 1),), {}), None)
    assert stage.compute(Call((torch.ones(3, 1),), {}), None).sum() == 6
