"""What a pipeline rejects before anything runs, and leaves the model alone."""

from __future__ import annotations

import re
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.config.schema import ParallelConfig, PipelineConfig
from halfmesh.errors import IncompatibleConfigError, InputError
from halfmesh.parallel.mesh import ParallelContext
from halfmesh.parallel.pipeline.axis import StageParameters
from halfmesh.parallel.pipeline.partition import resolve
from halfmesh.parallel.pipeline.pieces import Call, Piece
from halfmesh.parallel.pipeline.stage import ForwardContext, StageModule
from halfmesh.parallel.pipeline.transport import pack, restore
from halfmesh.utils.tensors import tensors_of
from halfmesh.utils.torch_private import shapes_only
from tests.support.models import CLASSES, FEATURES, make_engine, make_loader, sgd
from tests.support.pipeline_parts import pipe


def deep(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *more, nn.Linear(16, CLASSES))


class Blocks(nn.Module):
    """No partitioner knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AnyArguments(Blocks):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().forward(x)


class NormTwice(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks[0](self.norm(self.stem(x)))))


def embedding(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 16, **options), nn.Linear(16, CLASSES))


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


SPARSE = "0: sparse=True and scale_grad_by_freq=True do not work under a pipeline"
REJECTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch": (
        deep,
        pipe(microbatches=3),
        "parallel.pipeline.microbatches=3 does not divide the dataloader's batch_size=8; change one of the two",
    ),
    "too few blocks": (
        deep,
        pipe(4, 4),
        "pipeline.size=4 needs 4 stages, but Sequential has only 3 pieces (0, 1, 2); use at most 3 stages",
    ),
    "no partitioner": (
        Blocks,
        pipe(2, 2, schedule="interleaved", chunks=2),
        "no partitioner knows Blocks; name the modules that start a stage, for example "
        "partition=('blocks.1', 'blocks.3', 'blocks.4')",
    ),
    "nor split points": (AnyArguments, pipe(), "split points do not work either, because its forward takes *args"),
    "wrong partitioner": (Blocks, pipe(partition="sequential"), "the partitioner 'sequential' does not know Blocks"),
    "wrong point": (Blocks, pipe(partition=("block.3",)), "'block.3' is not a module of the model; did you mean"),
    "wrong number of points": (
        Blocks,
        pipe(partition=("blocks.1", "blocks.2")),
        "2 split points for 3 stages, but pipeline.size=2 needs 2; name the 1 module with",
    ),
    "non_split": (deep, pipe(non_split=("inputs",)), "has an argument 'inputs'; did you mean 'input'?"),
    "statistics of two stages": (
        NormTwice,
        pipe(partition=("blocks.0",)),
        "norm.running_mean, norm.running_var: several stages use this norm",
    ),
    "sparse": (lambda: embedding(sparse=True), pipe(), SPARSE),
    "frequency": (lambda: embedding(scale_grad_by_freq=True), pipe(), SPARSE),
    "SyncBatchNorm": (lambda: deep(nn.SyncBatchNorm(16)), pipe(), "SyncBatchNorm needs all ranks"),
    "compiled": (compiled, pipe(), "a compiled model cannot be split into stages; pass it uncompiled"),
    "hooks": (hooked, pipe(), "the model itself: it has hooks, but under a pipeline it is not called"),
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
    optimizer = sgd(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatibleConfigError, match=re.escape(message)):
        halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), config, device="cpu")
    assert not dist.is_initialized()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_a_criterion_with_weights_of_the_model():
    model = deep()
    model.add_module("loss", nn.Linear(4, 4))
    with pytest.raises(IncompatibleConfigError, match=r"criterion: it uses weights of the model \(loss"):
        make_engine(pipe(), model=model, criterion=model.loss)


def test_optimizers_that_join_all_parameters():
    with pytest.raises(IncompatibleConfigError, match=r"Lamb has max_grad_norm=1.0, which applies to all"):
        make_engine(pipe(), model=deep(), optimizer=Lamb)


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


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_told():
    model = nn.Sequential(Locked(), nn.Linear(4, 4))
    context = ParallelContext(ParallelConfig(pipeline=PipelineConfig(size=2)).dims(2), torch.device("cpu"))
    with pytest.raises(InputError, match=r"the model cannot be copied \(cannot pickle '_thread.lock' object\)"):
        StageParameters(model, sgd(model.parameters()), resolve(model, 2, 1), context)


def test_only_activations_are_sent_in_another_dtype():
    """fp32 with a gradient and rows of features; not tables, auxiliary losses, half precision or numbers."""
    hidden, half = torch.full((2, 3), 1.001, requires_grad=True), torch.ones(2, 3, dtype=torch.float16)
    wide = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    loss, table, ids = torch.ones(2, requires_grad=True).sum(), torch.ones(3, 3), torch.arange(6).view(2, 3)
    tree = [hidden * 1, {"half": half, "wide": wide * 1}, (loss, table, ids)]
    sent = pack(tree, tree, torch.bfloat16)
    kept = [torch.float16, torch.float64, torch.float32, torch.float32, torch.float64]
    assert [tensor.dtype for tensor in sent] == [torch.bfloat16, *kept]
    assert [tensor.dtype for tensor in pack(tree, tree)] == [torch.float32, *kept]
    back = restore(sent, tree)
    assert back[0].equal(hidden.bfloat16().float())
    for found, given in zip(tensors_of(back[1:]), tensors_of(tree[1:]), strict=True):
        assert (found.dtype, found.equal(given)) == (given.dtype, True)
